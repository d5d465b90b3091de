"""Archives made by hand, around images made by hand."""

import io
import json
import tempfile
from pathlib import Path

from kedge.containers.archive.tar import DIRECTORY, HARD_LINK, SYMLINK, Member
from kedge.containers.archive.tar_writer import TarWriter
from tests.unit.containers.criu_writer import write_dump


def tar_of(members: list[tuple[Member, bytes]], *, sizes: bool = True) -> bytes:
    """A tar; with sizes=False members may claim more data than they have."""
    out = io.BytesIO()
    writer = TarWriter(out)
    for member, data in members:
        try:
            writer.add(member, [data] if data else [])
        except ValueError:
            if sizes:
                raise
    writer.close()
    return out.getvalue()


def archive_files(manager: str | None = "libpod") -> dict[str, bytes]:
    """The files of an archive of podman, of "cri-o", or (None) of containerd."""
    annotations = {"io.container.manager": manager} if manager else {"io.kubernetes.cri.container-name": "counter"}
    if manager == "cri-o":
        annotations["io.kubernetes.cri-o.Metadata"] = json.dumps({"name": "counter"})
    config = {
        "id": "d2b88c2931", "name": "counter", "rootfsImageName": "localhost/counter:1", "runtime": "runc",
        "createdTime": "2026-01-02T03:04:05Z", "checkpointedTime": "2026-01-02T04:04:05Z", "onlyPodmanKnows": [1, 2],
    }  # fmt: skip
    spec = {
        "ociVersion": "1.0.2", "annotations": annotations, "root": {"path": "/somewhere/merged"},
        "process": {"args": ["/counter"], "env": ["TOKEN=secret"], "cwd": "/"},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {"namespaces": [{"type": "pid"}, {"type": "network"}]},
    }  # fmt: skip
    layer = [
        (Member(b"data", DIRECTORY, mode=0o755, mtime_ns=10**18), b""),
        (Member(b"data/log", size=42, mode=0o640, uid=3, mtime_ns=10**18 + 5, attributes={b"user.a": b"b"}), b"x" * 42),
        (Member(b"data/same", HARD_LINK, link=b"data/log"), b""),
        (Member(b"link", SYMLINK, mode=0o777, link=b"data/log", mtime_ns=10**18), b""),
        (Member(b"holes", size=1 << 22, ranges=[(0, 4096), (1 << 21, 4096)], mtime_ns=10**18), b"AB" * 4096),
    ]
    files = {"config.dump": json.dumps(config).encode(), "spec.dump": json.dumps(spec).encode()}
    with tempfile.TemporaryDirectory() as folder:
        write_dump(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            name = path.name if path.name == "stats-dump" else f"checkpoint/{path.name}"
            files[name] = path.read_bytes()
    files["checkpoint/descriptors.json"] = b'["/dev/null","pipe:[1]","pipe:[2]"]'
    if manager == "libpod":
        files["network.status"] = b"null"
        files["volumes/data.tar"] = tar_of([])
    if manager is None:
        files["status"] = b'{"CreatedAt":1}'
        layer.append((Member(b"etc/.wh.gone", mtime_ns=10**18), b""))
    else:
        files["deleted.files"] = b'["/etc/gone"]'
    files["rootfs-diff.tar"] = tar_of(layer)
    return files
