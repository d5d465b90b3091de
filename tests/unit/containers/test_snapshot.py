"""The state of a container checkpoint: pages cut by address, exact trees, keys and generations."""

import os
import stat
from pathlib import Path

import pytest

import kedge
from kedge.containers import snapshot
from kedge.containers.criu.pages import PAGE_BYTES, cuts


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def record(*pairs: tuple[int, int]) -> bytes:
    body = b"".join(varint(number << 3) + varint(value) for number, value in pairs)
    return len(body).to_bytes(4, "little") + body


def write_pagemap(folder: Path, *runs: tuple[int, int, int]) -> None:
    """(address, pages, flags) of each run; the pages file gets one byte value per address."""
    head = (0x54564319).to_bytes(4, "little") + (0x56084025).to_bytes(4, "little")
    image = head + record((1, 1)) + b"".join(record((1, at), (5, count), (4, flags)) for at, count, flags in runs)
    (folder / "pagemap-1.img").write_bytes(image)
    with (folder / "pages-1.img").open("wb") as pages:
        for at, count, flags in runs:
            if flags & 4:
                for page in range(count):
                    pages.write((at + page * PAGE_BYTES).to_bytes(8, "big") * (PAGE_BYTES // 8))


def test_pages_are_cut_by_address(tmp_path: Path) -> None:
    write_pagemap(tmp_path, (0xF000, 3, 4), (0x15000, 1, 4), (0x16000, 9, 1), (0x40000, 40, 4))
    page = PAGE_BYTES
    # One page before 0x10000; three of the window behind it, in two runs; then 40 pages in windows of 16.
    assert cuts(tmp_path) == {"pages-1.img": [page, 4 * page, 20 * page, 36 * page, 44 * page]}


def test_a_grown_mapping_moves_no_chunk(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    with kedge.open("memory:") as store:
        write_pagemap(folder, (0x100000, 64, 4), (0x900000, 512, 4))
        store.save("container:a", "a", {"images": snapshot.images_tree(folder)})
        write_pagemap(folder, (0x100000, 65, 4), (0x900000, 512, 4))
        second = store.save("container:a", "a", {"images": snapshot.images_tree(folder)})
        assert store.get(second).stored_bytes < 64 * 1024
        loaded = store.load(second)
        assert isinstance(loaded, dict)
        loaded["images"].write_to(tmp_path / "back")
    assert (tmp_path / "back/pages-1.img").read_bytes() == (folder / "pages-1.img").read_bytes()


@pytest.mark.parametrize("cut_off", [4, 11, 13, 30])
def test_a_damaged_pagemap_is_told(tmp_path: Path, cut_off: int) -> None:
    write_pagemap(tmp_path, (0x1000, 3, 4), (0x8000, 1, 4))
    whole = (tmp_path / "pagemap-1.img").read_bytes()
    (tmp_path / "pagemap-1.img").write_bytes(whole[:cut_off])
    with pytest.raises(kedge.Corrupted, match="pagemap-1"):
        cuts(tmp_path)


@pytest.mark.requires("root")
def test_an_exact_tree_keeps_everything(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "plain").write_bytes(b"x")
    os.setxattr(upper / "plain", "user.note", b"\0\xff")
    os.setxattr(upper / "plain", "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
    os.link(upper / "plain", upper / "twin")
    os.mknod(upper / "whiteout", stat.S_IFCHR, os.makedev(0, 0))
    os.link(upper / "whiteout", upper / "whiteout-2")
    os.mknod(upper / "tty", stat.S_IFCHR | 0o620, os.makedev(5, 1))
    os.mkfifo(upper / "fifo", 0o640)
    os.chown(upper / "fifo", 1234, 4321)
    (upper / "opaque").mkdir()
    os.setxattr(upper / "opaque", "trusted.overlay.opaque", b"y")
    os.setxattr(upper / "opaque", "trusted.overlay.origin", b"elsewhere")
    os.symlink("nowhere", upper / "link")
    os.setxattr(upper / "link", "trusted.mark", b"l", follow_symlinks=False)
    with (upper / "holes").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    os.chmod(upper / "holes", 0o6755)
    os.utime(upper / "fifo", ns=(1, 1_700_000_000_123_456_789))
    with kedge.open("memory:") as store:
        saved = store.save("j", "s", {"rootfs": snapshot.files_tree(upper)})
        loaded = store.load(saved)
        assert isinstance(loaded, dict)
        with pytest.raises(kedge.Validation, match="exact=True"):
            loaded["rootfs"].write_to(tmp_path / "refused")
        loaded["rootfs"].write_to(tmp_path / "back", exact=True)
    back = tmp_path / "back"
    assert not (tmp_path / "refused").exists()
    assert sorted(os.listdir(back)) == sorted(os.listdir(upper))
    for name in os.listdir(upper):
        old, new = os.lstat(upper / name), os.lstat(back / name)
        for field in ("st_mode", "st_uid", "st_gid", "st_rdev", "st_mtime_ns"):
            assert getattr(old, field) == getattr(new, field), (name, field)
        attributes = set(os.listxattr(upper / name, follow_symlinks=False)) - {"trusted.overlay.origin"}
        assert set(os.listxattr(back / name, follow_symlinks=False)) == attributes
        for attribute in attributes:
            values = [os.getxattr(side / name, attribute, follow_symlinks=False) for side in (upper, back)]
            assert values[0] == values[1]
    assert os.path.samefile(back / "plain", back / "twin")
    assert (back / "holes").stat().st_blocks < 100


def test_a_store_in_a_container_is_one_of_its_files(tmp_path: Path) -> None:
    """A program in a container that uses Kedge itself finds its checkpoints again."""
    with kedge.open(tmp_path / "work/store") as inner:
        inner.save("j", "s", {"n": 1})
    with kedge.open("memory:") as store:
        saved = store.save("j", "s", {"rootfs": snapshot.files_tree(tmp_path)})
        names = {entry.path for entry in store.load(saved)["rootfs"].entries}
    assert "work/store/kedge-store" in names


def test_sockets_are_reported(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert snapshot.files_tree(tmp_path).skipped == [("s", "a socket")]


def test_keys_and_generations(tmp_path: Path) -> None:
    (tmp_path / "inventory.img").write_bytes(b"i")
    taken = snapshot.Snapshot("container", "c1", snapshot.images_tree(tmp_path), descriptors=("/dev/null",))
    with kedge.open("memory:") as store:
        with pytest.raises(kedge.NotFound, match="kedge container list"):
            snapshot.find(store, "container", "web")
        for _ in range(2):
            newest = store.save(
                snapshot.job_of("container", "web"), "web", taken.state(), metadata={"kind": "container"}
            )
        assert snapshot.find(store, "container", "web").id == newest
        assert snapshot.find(store, "container", newest).id == newest
        _, loaded = snapshot.load(store, newest)
        assert loaded.images.read("inventory.img") == b"i"
        assert loaded.descriptors == ("/dev/null",)
        store.set_status(newest, "corrupted")
        assert snapshot.find(store, "container", "web").id != newest
        other = store.save("j", "s", {"a": 1})
        with pytest.raises(kedge.Validation, match="not a checkpoint of a container"):
            snapshot.load(store, other)
        with pytest.raises(kedge.InvalidName):
            snapshot.job_of("container", "../x")
