"""Users of a group share a store: whoever made which file, and whatever their umask, each can go on."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.users import public_folder, run_as

pytestmark = [pytest.mark.faults, pytest.mark.requires("root")]

TEAM, ANNA, BEN = 54321, 54331, 54332
SAVE = """
with kedge.open(arguments[0]) as store:
    store.save("job", "small", {"n": 1})
    store.save("job", "large", os.urandom(200_000))
"""
READ = """
store = kedge.open(arguments[0])
for checkpoint in store.list("job"):
    store.load(checkpoint.id)
{end}
"""
CLEAN = """
with kedge.open(arguments[0]) as store:
    store.cleanup("job", keep_last=1)
    store.gc()
    assert store.verify().is_ok
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with public_folder() as folder:
        yield folder


def act(user: int, program: str, url: str, umask: int) -> None:
    run_as(user, program, url, group=user, also_in=TEAM, umask=umask)


@pytest.mark.parametrize("scheme", ["file", "files"])
@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077], ids=oct)
def test_two_users_of_a_group(place: Path, scheme: str, umask: int) -> None:
    team = place / "team"
    team.mkdir()
    os.chown(team, 0, TEAM)
    team.chmod(0o775)
    share_with(f"{scheme}:{team / 'store'}", TEAM)
    url = f"{scheme}:{team / 'store'}"
    act(ANNA, SAVE, url, umask)
    act(BEN, READ.replace("{end}", "os.kill(os.getpid(), 9)"), url, umask)  # leaves the files that reading needs
    act(ANNA, SAVE, url, umask)
    act(BEN, READ.replace("{end}", "store.close()"), url, umask)
    act(BEN, SAVE + "    os.kill(os.getpid(), 9)\n", url, umask)
    act(ANNA, SAVE, url, umask)
    act(BEN, CLEAN, url, umask)
    act(ANNA, CLEAN, url, umask)
    found = [path.stat() for path in team.rglob("*")]
    assert {status.st_gid for status in found} == {TEAM}
    assert not any(status.st_mode & 0o007 for status in found)


@pytest.mark.parametrize("scheme", ["file", "files"])
@pytest.mark.parametrize("parent", [0o755, 0o2775], ids=oct)
def test_a_store_is_its_owners_alone(place: Path, scheme: str, parent: int) -> None:
    """Whatever the umask, whoever may write where it is, and also when nothing of the path was there before."""
    home = place / "home"
    home.mkdir()
    os.chown(home, ANNA, TEAM)
    home.chmod(parent)
    act(ANNA, SAVE + CLEAN, f"{scheme}:{home / 'new' / 'store'}", 0o000)
    (home / "empty").mkdir()
    os.chown(home / "empty", ANNA, ANNA)
    act(ANNA, SAVE + CLEAN, f"{scheme}:{home / 'empty'}", 0o000)
    for path in [*(home / "new").rglob("*"), home / "new", home / "empty", *(home / "empty").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def share_with(url: str, group: int) -> None:
    """As `kedge migrate --shared-group` of the first user would; the group has no name here."""
    folder = Path(url.partition(":")[2])
    folder.mkdir()
    os.chown(folder, ANNA, group)
    folder.chmod(0o2770)


def test_an_index_from_before_is_shared_when_its_owner_opens_it(place: Path) -> None:
    team = place / "team"
    team.mkdir()
    os.chown(team, ANNA, TEAM)
    team.chmod(0o2775)
    url = f"file:{team / 'store'}"
    share_with(url, TEAM)
    act(ANNA, SAVE, url, 0o002)
    (team / "store/index.sqlite").chmod(0o644)
    act(BEN, READ.replace("{end}", "store.close()"), url, 0o002)  # can only read it
    act(ANNA, SAVE, url, 0o002)
    act(BEN, SAVE, url, 0o002)
