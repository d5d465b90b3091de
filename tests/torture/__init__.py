"""Faults on purpose: the code behind `tests/faults` and behind `./dev torture`, its long form.

    states      states that a seed makes and checks again
    ledger      what a store has acknowledged, and whether it kept it
    children    processes that use a store and may be killed at any time
    disks       small file systems of our own: full ones, and ones whose power is cut
    tracing     strace: which system calls an operation makes; kill or fail one of them
    crash       every disk a power cut may leave, computed from a trace
    mutants     safeguards taken out, one at a time

and one module for each fault: kill_loop, syscalls, power_cut, crash_states, sync_mutants, bitflips, disk_full,
many_processes, races. Each has a function for pytest to call with small numbers and `torture(minutes, folder)`.
"""
