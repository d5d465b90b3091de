"""A restore gives no container more than its configuration: what is in the images is compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kedge.containers.credentials import confinement, refuse_more
from kedge.containers.protobuf import encode
from kedge.errors import Conflict, Corrupted
from tests.unit.containers.criu_writer import image

CHOWN, SYS_ADMIN, SETUID, SETGID = 0, 21, 7, 6


def words(*capabilities: int) -> list[int]:
    bits = sum(1 << number for number in capabilities)
    return [bits & 0xFFFFFFFF, bits >> 32]


def credentials(
    *,
    uid: int = 1000,
    gid: int = 1000,
    groups: tuple[int, ...] = (),
    permitted: tuple[int, ...] = (),
    bounding: tuple[int, ...] = (CHOWN,),
    no_new_privileges: bool = True,
    label: str = "",
) -> bytes:
    users = [(field, uid if field % 2 else gid) for field in range(1, 9)]
    sets = [(field, word) for field in (9, 10, 11, 19) for word in words(*permitted)]
    sets += [(12, word) for word in words(*bounding)]
    rest = [(13, 0), *((14, group) for group in groups), (15, label), (18, int(no_new_privileges))]
    return encode([*users, *sets, *rest])


def write_core(directory: Path, thread: int, *own: tuple[int, int | bytes], namespace: int = 1, state: int = 1) -> None:
    directory.mkdir(exist_ok=True)
    fields = [(1, 1), (3, encode([(1, state)])), (4, encode([(2, 5), (10, namespace)])), (5, encode(own))]
    (directory / f"core-{thread}.img").write_bytes(image("core", [fields]))


def spec_of(process: Mapping[str, Any] | None = None, linux: Mapping[str, Any] | None = None) -> dict[str, Any]:
    usual = {
        "user": {"uid": 1000, "gid": 1000},
        "noNewPrivileges": True,
        "capabilities": {"bounding": ["CAP_CHOWN"], "permitted": ["CAP_CHOWN"], "effective": ["CAP_CHOWN"]},
    }
    return {"process": {**usual, **(process or {})}, "linux": {"namespaces": [{"type": "pid"}], **(linux or {})}}


def test_what_the_configuration_gives_is_restored(tmp_path: Path) -> None:
    write_core(tmp_path / "images", 1, (10, credentials()), (11, 2))
    write_core(tmp_path / "images", 2, (10, credentials()), (11, 2))
    write_core(tmp_path / "images", 3, state=6)  # a zombie has no rights
    refuse_more(tmp_path / "images", spec_of(linux={"seccomp": {"defaultAction": "SCMP_ACT_ERRNO"}}))


def test_root_has_what_the_container_may_have(tmp_path: Path) -> None:
    write_core(tmp_path / "images", 1, (10, credentials(uid=0, gid=0, permitted=(CHOWN,), no_new_privileges=False)))
    root = {"user": {"uid": 0, "gid": 0}, "noNewPrivileges": False}
    refuse_more(tmp_path / "images", spec_of(root))
    with pytest.raises(Conflict, match="CAP_CHOWN"):
        refuse_more(tmp_path / "images", spec_of({**root, "capabilities": {}}))


@pytest.mark.parametrize(
    ("own", "what"),
    [
        ({"permitted": (SYS_ADMIN,)}, "CAP_SYS_ADMIN"),
        ({"bounding": (CHOWN, SYS_ADMIN)}, "CAP_SYS_ADMIN"),
        ({"permitted": (CHOWN,)}, "CAP_CHOWN"),  # which no process of this user gets by running a program
        ({"bounding": (60,)}, "capability 60"),
        ({"no_new_privileges": False}, "new privileges"),
        ({"uid": 0}, "is user 0"),
        ({"gid": 0}, "is in group 0"),
        ({"groups": (1000, 27)}, "is in group 27"),
    ],
)
def test_more_than_that_is_refused(tmp_path: Path, own: dict[str, Any], what: str) -> None:
    write_core(tmp_path / "images", 1, (10, credentials()))
    write_core(tmp_path / "images", 2, (10, credentials(**own)))
    with pytest.raises(Conflict, match=what):
        refuse_more(tmp_path / "images", spec_of())


def test_who_may_change_users_may_be_any(tmp_path: Path) -> None:
    able = {"bounding": (SETUID, SETGID), "permitted": (SETUID, SETGID)}
    write_core(tmp_path / "images", 1, (10, credentials(uid=7, gid=8, groups=(9,), **able)))
    names = ["CAP_SETUID", "CAP_SETGID"]
    sets = {"bounding": names, "ambient": names}
    refuse_more(tmp_path / "images", spec_of({"capabilities": sets}))


def test_confinement_is_kept(tmp_path: Path) -> None:
    write_core(tmp_path / "images", 1, (10, credentials()))
    with pytest.raises(Conflict, match="seccomp"):
        refuse_more(tmp_path / "images", spec_of(linux={"seccomp": {"defaultAction": "SCMP_ACT_ERRNO"}}))
    with pytest.raises(Conflict, match="AppArmor"):
        refuse_more(tmp_path / "images", spec_of({"apparmorProfile": "cri"}))
    with pytest.raises(Conflict, match="SELinux"):
        refuse_more(tmp_path / "images", spec_of({"selinuxLabel": "system_u:system_r:container_t:s0:c1,c2"}))
    write_core(tmp_path / "images", 1, (10, credentials(label="cri")))
    refuse_more(tmp_path / "images", spec_of({"apparmorProfile": "cri"}))
    refuse_more(tmp_path / "images", spec_of({"apparmorProfile": "unconfined"}))
    assert confinement(spec_of({"selinuxLabel": "a:b:c:s0"})) == ["--lsm-profile=selinux:a:b:c:s0"]
    assert confinement(spec_of()) == []


def write_threads(images: Path, *filters: list[tuple[int, int | bytes]]) -> None:
    """A process of two threads, whose first one has the last of these filters; CRIU wrote none for the second."""
    write_core(images, 1, (10, credentials()), (11, 2), (12, len(filters) - 1))
    later = [(1, 1), (5, encode([(10, credentials()), (11, 0)]))]  # of what all threads share it says nothing
    (images / "core-2.img").write_bytes(image("core", [later]))
    (images / "pstree.img").write_bytes(image("pstree", [[(1, 1), (2, 0), (3, 1), (4, 1), (5, 1), (5, 2)]]))
    (images / "seccomp.img").write_bytes(image("seccomp", [[(1, encode([(1, b"x" * 8), *one])) for one in filters]]))


def test_a_filter_that_is_set_for_all_threads_confines_them(tmp_path: Path) -> None:
    confined = spec_of(linux={"seccomp": {"defaultAction": "SCMP_ACT_ERRNO"}})
    for filters in ([[(3, 1)]], [[(3, 1)], [(2, 0), (3, 3)]]):
        write_threads(tmp_path / "images", *filters)
        refuse_more(tmp_path / "images", confined)
    for filters in ([[(3, 0)]], [[]], [[(3, 0)], [(2, 0), (3, 1)]], [[(2, 0), (3, 1)]], []):
        write_threads(tmp_path / "images", *filters)
        with pytest.raises(Conflict, match="thread 2 is confined by no seccomp filter"):
            refuse_more(tmp_path / "images", confined)


def test_an_old_image_names_the_filter_of_a_process(tmp_path: Path) -> None:
    confined = spec_of(linux={"seccomp": {"defaultAction": "SCMP_ACT_ERRNO"}})
    write_threads(tmp_path / "images", [])
    for task, is_confined in (([(1, 1), (11, 2), (12, 0)], True), ([(1, 1), (11, 0)], False)):
        own = encode([(10, credentials()), (11, 2)])
        fields = [(1, 1), (3, encode(task)), (4, encode([(2, 5), (10, 1)])), (5, own)]
        (tmp_path / "images" / "core-1.img").write_bytes(image("core", [fields]))
        if is_confined:
            refuse_more(tmp_path / "images", confined)
        else:
            with pytest.raises(Conflict, match="thread 1 is confined by no"):
                refuse_more(tmp_path / "images", confined)


def test_user_namespaces_are_those_of_the_configuration(tmp_path: Path) -> None:
    images = tmp_path / "images"
    write_core(images, 1, (10, credentials()))
    own = {"namespaces": [{"type": "user"}], "uidMappings": [{"containerID": 0, "hostID": 100000, "size": 10}]}
    with pytest.raises(Conflict, match="user namespace"):
        refuse_more(images, spec_of(linux=own))
    for outside, is_fine in ((100000, True), (0, False)):
        line = encode([(1, 0), (2, outside), (3, 10)])
        (images / "userns-9.img").write_bytes(image("userns", [[(1, line), (2, line)]]))
        if is_fine:
            refuse_more(images, spec_of(linux=own))
        else:
            with pytest.raises(Conflict, match="uidMappings"):
                refuse_more(images, spec_of(linux=own))
    with pytest.raises(Conflict, match="user namespace"):
        refuse_more(images, spec_of())
    (images / "userns-9.img").unlink()
    write_core(images, 2, (10, credentials()), namespace=2)
    with pytest.raises(Conflict, match="several user namespaces"):
        refuse_more(images, spec_of())


def test_what_criu_would_read_otherwise_is_damage(tmp_path: Path) -> None:
    """Of parts that are there twice CRIU joins the lists, and takes the first words: those of the attacker."""
    images = tmp_path / "images"
    evil = credentials(permitted=(SYS_ADMIN,))
    write_core(images, 1, (10, evil), (10, credentials()))
    with pytest.raises(Corrupted):
        refuse_more(images, spec_of())
    more = encode([(10, word) for word in (*words(SYS_ADMIN), *words())])
    write_core(images, 1, (10, credentials() + more))
    with pytest.raises(Corrupted):
        refuse_more(images, spec_of())
    write_core(images, 1)
    with pytest.raises(Corrupted):
        refuse_more(images, spec_of())
    thread = [(1, 1), (3, encode([(1, 1)])), (5, encode([(10, evil)])), (5, encode([(10, credentials())]))]
    (images / "core-1.img").write_bytes(image("core", [thread]))
    with pytest.raises(Corrupted):
        refuse_more(images, spec_of())
