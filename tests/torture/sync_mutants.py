"""Each call of Kedge that makes something durable or names it, and the test that notices when it is missing.

`sync_sites.py` finds the calls in the source; one that is not here fails tests/faults/test_sync_mutants.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .sync_sites import Site, find_sites, removed

_DURABLE = "tests/faults/test_durable_names.py::test_"
_CONTAINERS = "tests/unit/containers/"
_LIMIT_S = 600

CAUGHT: dict[str, tuple[str, ...]] = {
    f"{_DURABLE}a_new_store_and_its_large_saves": (
        "blobs/direct.py sync_data fdatasync",
        "blobs/direct.py sync_directory fsync",
        "blobs/pack_file.py Folder.sync sync_directory",
        "blobs/pack_file.py OpenPack.sync sync_data",
        "store/directory.py _create sync_directory",
        "store/directory.py _create _sync_names",
        "store/directory.py _sync_names sync_directory",
        "store/directory.py _write fsync",
        "store/directory.py _write replace",
        "store/directory.py _write sync_directory",
    ),
    f"{_DURABLE}whether_an_index_was_closed": (
        "index/sqlite/closed_mark.py IndexState._open fsync",
        "index/sqlite/closed_mark.py IndexState._open sync_directory",
        "index/sqlite/closed_mark.py IndexState._write sync_data",
    ),
    f"{_DURABLE}packs_whose_folder_another_process_made": ("blobs/pack_file.py Folder.sync sync_directory 2",),
    f"{_DURABLE}a_folder_of_packs_that_is_made_when_it_is_gone": ("blobs/direct.py make_directories sync_directory",),
    f"{_DURABLE}packs_beside_a_database": (
        "store/directory.py open_packs sync_directory",
        "store/directory.py open_packs _sync_names",
    ),
    f"{_DURABLE}a_repaired_store": (
        "care/repair.py repair sync_directory",
        "care/repair.py _put_aside rename",
        "care/repair.py _put_aside sync_directory",
    ),
    f"{_DURABLE}a_store_of_readable_files": (
        "care/repair_files.py _put_in_place link",
        "care/repair_files.py _put_in_place replace",
        "care/repair_files.py _put_in_place sync_directory",
        "index/files/index.py make_folder sync_directory",
        "index/files/index.py make_folder sync_directory 2",
        "index/files/journal.py Journal.append fsync",
        "index/files/journal.py draft_file fsync",
        "index/files/journal.py write_file replace",
        "index/files/shown_files.py ShownFiles.draft sync_directory",
        "index/files/shown_files.py ShownFiles.place replace",
        "index/files/shown_files.py ShownFiles.place sync_directory",
    ),
    f"{_DURABLE}a_journal_in_the_place_of_another": ("index/files/journal.py write_file sync_directory",),
    f"{_DURABLE}an_export": (
        "cli/placement.py place_file fsync",
        "cli/placement.py place_file sync_directory",
        "cli/placement.py placed_directory rename",
        "blobs/libc.py exchange renameat2",
        "cli/placement.py placed_directory sync_directory",
        "cli/placement.py added_to_directory sync_directory",
        "cli/placement.py _give_name replace",
        "cli/placement.py _give_name link",
        "cli/placement.py _sync_below fsync",
        "cli/placement.py _sync_below sync_directory",
    ),
    f"{_DURABLE}an_export_where_names_cannot_be_exchanged": (
        "cli/placement.py _take_name_in_steps rename",
        "cli/placement.py _take_name_in_steps rename 2",
        "cli/placement.py _take_name_in_steps rename 3",
        "cli/placement.py _take_name_in_steps rename 4",
    ),
    f"{_DURABLE}an_export_where_there_are_no_hard_links": ("cli/placement.py _give_name replace 2",),
    f"{_DURABLE}an_archive": (
        "containers/archive/export.py replace_file fsync",
        "containers/archive/export.py replace_file replace",
        "containers/archive/export.py replace_file sync_directory",
    ),
    f"{_DURABLE}a_restored_directory": (
        "blobs/direct.py make_directories sync_directory",
        "files/output.py Filling._make_links link",
        "files/output.py Filling._finish fsync",
        "files/restore.py write_tree fsync",
        "files/restore.py write_tree fsync 2",
        "files/restore.py _rename_to rename",
        "files/restore.py _sync fsync",
        "files/restore.py _sync sync_file_system",
    ),
    f"{_DURABLE}a_directory_restored_into_one_that_exists": (
        "files/restore.py _move_into rename",
        "files/restore.py _remove rename",
    ),
    f"{_DURABLE}a_restored_file": (
        "files/restore.py write_file rename",
        "files/restore.py write_file fsync",
        "files/restore.py _rename_new link",
        "files/restore.py _rename_new rename",
    ),
    f"{_DURABLE}a_system_without_fdatasync": ("blobs/direct.py sync_data fsync",),
    f"{_DURABLE}all_files_of_a_disk_at_once": (
        "blobs/libc.py sync_file_system sync",
        "blobs/libc.py sync_file_system syncfs",
    ),
    f"{_CONTAINERS}test_moved_files.py": (
        "containers/moved_files.py put_back replace",
        "containers/moved_files.py _is_linked link",
        "containers/moved_files.py replaced rename",
        "containers/moved_files.py replaced sync_directory",
    ),
    f"{_CONTAINERS}test_page_writer.py": ("containers/page_writer.py PageWriter._write rename",),
    f"{_CONTAINERS}test_safe_copy.py": ("containers/safe_copy.py _Copy._link link",),
    f"{_CONTAINERS}test_volumes.py": (
        "containers/volumes.py Stage.put_in_place rename",
        "containers/volumes.py Stage.put_in_place rename 2",
        "containers/volumes.py Stage.put_back rename",
        "containers/volumes.py Stage.put_back rename 2",
        "containers/volumes.py _move rename",
    ),
    f"{_CONTAINERS}test_bundle.py": (
        "containers/attempts.py Attempt.describe rename",
        "containers/bundle.py Bundle._write_config rename",
        "containers/bundle.py give_images link",
    ),
    f"{_CONTAINERS}gpu/test_notes.py": ("containers/gpu/memory.py write_note replace",),
    f"{_CONTAINERS}runtime/test_early.py": (
        "containers/runtime/early.py look_ahead rename",
        "containers/runtime/early.py write_mark rename",
    ),
    f"{_CONTAINERS}archive/test_arch.py": (
        "legacy/arch.py restore_checkpoint_file rename",
        "legacy/arch.py restore_checkpoint_file rename 2",
        "legacy/arch.py export rename",
        "legacy/arch.py export sync_directory",
    ),
    "tests/security/test_container_archives.py": ("containers/archive/extraction.py Extraction._hard_link link",),
    "tests/unit/blobs/test_objects.py": (
        "blobs/objects.py ObjectBlobs.create put",
        "blobs/owner.py _create put",
        "blobs/probe.py _conditional.create put",
    ),
}

# What nothing durable depends on, and why it is there all the same.
NOT_NEEDED: dict[str, tuple[str, ...]] = {
    "FULL is what SQLite does by itself; the mutant `index not synced` turns it off, and crash_states notices": (
        "index/sqlite/database.py connect synchronous",
        "index/sqlite/salvage.py _transaction synchronous",
    ),
    "a deletion that a power cut takes back is made again by the next gc": (
        "blobs/postgres.py PostgresBlobs._forget synchronous",
    ),
    "early write-back, so that the sync after it has less to do": (
        "blobs/direct.py Output._sync_range sync_file_range",
        "blobs/libc.py sync_file_range sync_file_range",
    ),
    "kedge doctor measures how long the disk takes": (
        "cli/commands/doctor/disk.py measure_sync fsync",
        "cli/commands/doctor/disk.py measure_sync.write fdatasync",
        "cli/commands/doctor/disk.py measure_rename.replace fsync",
        "cli/commands/doctor/disk.py measure_rename.replace replace",
        "cli/commands/doctor/disk.py measure_rename.replace sync_directory",
        "cli/commands/doctor/disk.py measure_direct fdatasync",
    ),
    "a log for people keeps another name": ("containers/criu/command.py dump rename",),
}


def named() -> set[str]:
    return {site for table in (CAUGHT, NOT_NEEDED) for sites in table.values() for site in sites}


class _Failures:
    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.failed and report.when == "call"


def is_caught(site: Site, test: str) -> bool:
    """Whether this test fails without the call, in a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(_LIMIT_S)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            failures = _Failures()
            with removed(site):
                pytest.main(["-n0", "-qx", "-p", "no:cacheprovider", test], plugins=[failures])
            code = 0 if failures.count else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def torture(minutes: float, folder: Path) -> dict[str, float]:
    """Each call taken out once; takes as long as it takes."""
    sites = find_sites()
    wanted = [(site, test) for test, names in CAUGHT.items() for site in names]
    missed = [f"{name}: {test}" for name, test in wanted if name not in sites or not is_caught(sites[name], test)]
    if missed:
        raise AssertionError("not noticed by their tests:\n" + "\n".join(missed))
    return {"syncs": len(wanted), "caught": len(wanted), "not needed": len(sites) - len(wanted)}
