"""The errors of CRIU that Kedge has words for: what CRIU prints (its sources, 3.17 to 4.2), why, and what to do.

An entry is its code, which is stable, then

    ?  a regular expression for a part of the line; several are alternatives. It may capture `what` and `more`
    =  the cause, in which {what} and {more} are filled in
    >  the fix

Indented lines go on. Entries are tried in this order, so the special stands before the general.
"""

TABLE = r"""
# The freeze.

frozen-timeout
? Unable to freeze cgroup (?P<what>\S+)
= the processes of cgroup {what} did not stop in time: one of them sits in the kernel, often on a hung disk or NFS
> look for processes in state D with ps, then try again

ptraced
? Unseizable non-zombie (?P<what>\d+) found
= process {what} could not be taken hold of: a debugger, strace or another tracer has it, or ptrace is forbidden
> end the tracer; inside a container CRIU needs CAP_SYS_PTRACE and CAP_CHECKPOINT_RESTORE

needs-capability
? CRIU needs to have the CAP_SYS_ADMIN
? prctl: One needs CAP_SYS_RESOURCE
= CRIU has not the rights that it needs
> run it as root, with CAP_SYS_ADMIN, CAP_SYS_PTRACE and CAP_CHECKPOINT_RESTORE

limits-of-others
? Can't get rlimit \d+: Operation not permitted
= its processes belong to another user, and root may not read their limits here: CAP_SYS_RESOURCE is missing
> run Kedge, or the engine that calls it, with all capabilities of root; where that cannot be, let it run as root

no-such-process
? (?:Can't open (?P<what>\d+)/\S+ on procfs|No process root set): No such (?:file|process)
? Unable to detach from (?P<what>\d+): No such process
= process {what} ended while it was being dumped
> see why it ended; a container that is going down cannot be checkpointed

dead-thread
? Zombies? (?:thread|with threads)(?: are)? not supported
= a process has threads that have ended without being waited for
> try again in a moment; if it stays, the program itself has to join its threads

group-stopped
? Individually stopped threads not supported
? unsupported stop signal
= a single thread of a process is stopped
> send the process SIGCONT and try again

# Sockets.

tcp-established
? Connected TCP socket(?:, consider using| in image)
= a process has an established TCP connection
> give --tcp-established at the checkpoint and at the restore; the other end must keep its side meanwhile

mptcp
? Unsupported proto 262 for socket
? GODEBUG=multipathtcp=0
= a process has a multipath TCP socket, which CRIU cannot save (Go programs listen with them by default)
> start the program with GODEBUG=multipathtcp=0

socket-kind
? Unsupported (?:proto|socket family:?|socket type:?) (?P<what>\d+)
? Can't dump \d+ inet socket
= a process has a socket of a kind that CRIU cannot save ({what})
> close it before the checkpoint; TCP, UDP, raw, unix, netlink and packet sockets can be saved

socket-options
? Can't get 1:(?:16|34) opt: Operation not supported
= this kernel (6.16 or newer) no longer answers a question that this CRIU asks of every TCP and UDP socket
> use CRIU 4.2 or newer

tcp-half-closed
? TCP_REPAIR can't be enabled for half-closed sockets
= a TCP connection is half closed
> wait until it is gone, or give --tcp-close to drop connections

tcp-in-flight
? [Ii]n-flight connection(?!s waiting)
? Failed to lock TCP connection
= a TCP connection was just being made
> try again, or give --tcp-skip-in-flight

external-unix-socket
? External socket (?:is used|found in image)
? Can't dump name-less external socket
= a process is connected to a unix socket whose other end is outside of the container
> give --ext-unix-sk at the checkpoint and at the restore, or close it first (a mounted docker.sock, for example)

half-unix-stream
? Can't dump half of stream unix connection\. name: (?P<what>[^;]*)
= one end of the unix stream {what} is in the container and the other is not
> close the connection before the checkpoint; sockets from an engine or a systemd on the host are such

unix-peer
? Dangling connection (?P<what>\d+)
= unix socket {what} is connected to one that nobody has open any more
> give --ext-unix-sk, or close it first

network-lock
? Locking (?:network|connection) failed
? Iptables configuration failed
? iptables-restore returned
= the network could not be locked for the time of the dump: iptables or nftables does not work here
> install iptables (apt-get install iptables), or give --network-lock=skip when there are no connections to keep

address-in-use
? [Cc]an't bind[^:]*: Address already in use
= an address that the container listens on is taken
> stop what has it (often the first copy of the container), or restore in a network of its own

address-missing
? (?:[Cc]an't bind|connect inet socket back)[^:]*: (?:Cannot assign requested address|Network is unreachable)
= an address that the container used does not exist here
> give the container the same addresses as where it was frozen, or --tcp-close

loopback
? Unable to connect a socket: Network is unreachable
? kerndat_tcp_repair failed
= CRIU tries out TCP on the loopback device, which is down in this network namespace
> bring it up first: ip link set lo up

external-network
? Unable to find an external netns
? socket from an external network namespace
= the checkpoint belongs to a network namespace that was not given
> restore with the network mode of the checkpoint: pod network to pod network, host to host

network-device
? Unsupported link \d+ \(type \d+ kind (?P<what>[^)]*)\)
? Unsupported link type
= the network namespace has a device that CRIU cannot make again ({what})
> let the engine own the network namespace (an external one), or use host networking

# Files.

unlinked-file
? Can't create link remap for (?P<what>.+?)\. Use
= {what} is open but was deleted under that name, and has other names left
> give --link-remap; the file system must be writable

ghost-too-big
? Can't dump ghost file (?P<what>.+) of (?P<more>\d+) size, increase limit
= the deleted file {what} is still open and has {more} bytes, more than CRIU keeps in its images
> give --ghost-limit larger than that, or let the program close it

file-locks
? Some file locks are hold by dumping tasks
= a process holds file locks
> give --file-locks at the checkpoint and at the restore; locks shared with processes outside are lost

file-size
? File (?P<what>.+) has bad size (?P<more>\d+)
= {what} is not what it was when its process was frozen (it has {more} bytes now)
> restore the files of the same checkpoint first: kedge container restore does both

file-mode
? File (?P<what>.+) has bad mode
= {what} has other permissions than when its process was frozen
> restore the files with their modes and owners, or give --skip-file-rwx-check

file-build
? File (?P<what>.+) has bad (?:build-ID|checksum)
= {what} is another build than the one that ran when the process was frozen
> use the very same image, by digest; a tag may have moved

file-missing
? Can't open file (?P<what>.+) on restore: No such file
= {what} was open and does not exist here
> restore the files of the checkpoint first, and mount the same volumes

file-refused
? Can't open file (?P<what>.+) on restore: (?P<more>.+)
= {what} was open and cannot be opened here ({more})
> check permissions and mounts at that place

overmounted
? Open files on overmounted mounts are not supported yet.*path=(?P<what>.+)
= {what} is open below a place where something was mounted later
> close it, or mount before the program starts

host-file
? Can't lookup mount=\d+ for fd=(?P<more>-?\d+) path=(?P<what>.+)
= descriptor {more} is a file of the host: {what}
> give standard streams as pipes or /dev/null, and close descriptors that are inherited from outside

device-file
? Can't dump file (?P<more>-?\d+) of that type \[\d+\] \((?P<what>.*?)\)
= descriptor {more} is of a kind that CRIU cannot save ({what})
> close it before the checkpoint; for GPUs use a GPU checkpoint first, which closes its devices

bpf
? does not currently support dumping BPF map
= a process has a BPF map that CRIU cannot save
> close it before the checkpoint

uprobes
? PID (?P<what>\d+) has uprobes vma
? Dumped with --allow-uprobes
= a tracing tool has placed probes in process {what}
> remove the probes (bpftrace, perf, an APM agent), or give --allow-uprobes both times

mapping
? Unsupported mapping found
? Can't handle non-regular mapping
= a process has a memory mapping of a device or of io_uring, which CRIU cannot save
> let the program close it; for Node.js set UV_USE_IO_URING=0

inotify
? Can't dump that handle
? Can't (?:find|open) (?:inotify|handle)
? fsnotify: .*Failed to resolve
= a process watches a file that can only be found by searching
> stop the watch, or give --force-irmap with --irmap-scan-path

# Terminals and sessions.

shell-job
? is not a session leader\.
? Found dangling tty
? Task attached to shell terminal
? Don't have tty to inherit session
? ctty inheritance detected
= the process belongs to a terminal or a session that is outside
> give --shell-job at the checkpoint and at the restore, or start it without a terminal (setsid)

session-outside
? A session leader of \S* ?(?:process )?(?P<what>\d+)\(.*is outside of its pid namespace
? Can't find a session leader for (?P<what>\d+)
= a process belongs to a session that was started from outside of the container (exec into it, for example)
> end what was started by exec first

# Mounts.

external-mount
? Mount \d+:(?P<what>\S+) is autodetected external mount
? No mapping for \d+:(?P<what>\S+)
= {what} is mounted from outside and was not named as external
> give the bundle that the container had: the runtime names its mounts; for CRIU itself --external mnt[…]

mount-sharing
? has unreachable sharing
= a mount shares its changes with mounts outside of the container
> mount it private (rprivate), or give --enable-external-masters

mount-file-system
? FS mnt \.?(?P<what>\S+) dev \S+ root \S+ unsupported
= {what} is a mount of a file system whose content CRIU cannot save, and came in with the mount above it
> mount it by itself in the container's configuration (bind, and its parent bind instead of rbind)

mount-root
? \b\d+:(?P<what>\S+) doesn't have a proper root mount
= only a part of a file system is mounted at {what}, and the whole is not in the container
> make it a mount of the container's configuration, so that the runtime names it as external

fuse
? (?<!\S)(?P<what>\S+) is a fuse mount but not external
= {what} is a FUSE mount
> unmount it before the checkpoint, or mount it from outside

mount-failed
? (?:Can't mount at|Unable to mount|Can't bind-mount at) (?P<what>\S+):? ?(?P<more>.*)
= {what} could not be mounted again ({more})
> the mounts of the bundle must exist on this machine, with the same types at the same places

nested-namespace
? Can't dump nested (?P<what>\w+) namespace
? Nested mount namespaces are not supported
= a process inside made namespaces of its own ({what}), as containers in containers and browsers do
> turn off the inner sandbox for the checkpoint

# Memory, CPU, kernel.

cpu-features
? CPU (?:Feature|capabilities|instruction|xsave|xfeatures)
? FPU feature required by image
? FPU xsave area present
= this CPU lacks something that the processes used where they were frozen
> restore on a machine with the same CPU features, or checkpoint on the weaker one

architecture
? Core march mismatch
? Only 64 bit tasks are supported
? running in 32-bit mode
= the processes are of another architecture than this CRIU handles
> restore on the same architecture; 32-bit programs need a CRIU with compat support

dirty-tracking
? Tracking memory is not available
= this kernel cannot tell which memory changed (CONFIG_MEM_SOFT_DIRTY)
> leave out pre-dumps; Kedge stores unchanged memory once all the same

lazy-pages
? (?:UFFD is not supported|Lazy pages (?:are not available|transfer FAILED)|uffd: .*Operation not permitted)
= memory cannot be brought in later: userfaultfd is missing or forbidden
> restore without --lazy-pages, or set vm.unprivileged_userfaultfd=1

rseq
? has rseq but kernel lacks get_rseq_conf
? Can't fixup rseq
? Dump \d+ rseq failed
= a program uses restartable sequences (every glibc since 2.35 does) and kernel or CRIU are too old for that
> use CRIU 3.17 or newer and Linux 5.13 or newer, or set GLIBC_TUNABLES=glibc.pthread.rseq=0 in the container

seccomp
? failed to suspend seccomp
? couldn't suspend seccomp
? Dumping seccomp filters not supported
? PTRACE_O_SUSPEND_SECCOMP
= the seccomp filter of the container cannot be put aside while its processes are saved
> CRIU needs CAP_SYS_ADMIN and a kernel with CONFIG_CHECKPOINT_RESTORE

lsm
? can't write lsm profile
? apparmor LSM specified but
? invalid argument .* for --lsm-profile
? policy in AA namespace
= the AppArmor or SELinux profile of the container cannot be set here
> load the same profile on this machine, or give --lsm-profile

vdso
? vDSO
? vdso
? vvar
= the processes cannot be fitted to the vDSO of this kernel
> use a newer CRIU, or restore on a kernel like that of the checkpoint

guard-pages
? Collect MADV_GUARD_INSTALL pages
= CRIU does not get along with this kernel's guard pages
> use CRIU 4.2 or newer

cgroup
? Can't move \S+ into (?P<what>\S+)
? Failed accessing cgroup dir
? Abort restore of existing cgroups
? Neither a cgroupv1 \(freezer\.state\)
? cgroupd:
= a cgroup could not be made or entered {what}
> give --manage-cgroups-mode=ignore (the runtime makes them), and use the cgroup version of the checkpoint

# Processes coming back.

pid-taken
? Can't fork for (?P<what>\d+): File exists
? Pid \d+ do not match expected (?P<what>\d+)
= process number {what} is taken
> restore in a PID namespace of its own (a container), or end what has that number

pid-refused
? Can't fork for (?P<what>\d+): Operation not permitted
? Can't set last_pid
= a process could not get its old number {what}: not permitted
> CRIU needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE in the PID namespace

session-clash
? Current (?:gid|sid) (?P<what>\d+) intersects with
= the session or group {what} that restores has the number of one that comes back
> start the restore with setsid, or from another shell

needs-tcp-close
? Need to set the --tcp-close options
= the checkpoint was made with --tcp-close
> give --tcp-close at the restore too

restored-process-died
? \b(?P<what>\d+) (?:killed by|was killed by|exited, status=|stopped by) ?(?:signal )?(?P<more>.*)
= process {what} ended while it was brought back ({more})
> see the lines above it in the log; often a file, a mount or memory that is missing here

# Images and disk.

no-space
? No space left on device
? Disk quota exceeded
= the disk is full
> make room, or choose another work directory; a failed dump leaves the processes running

image-version
? Not supported images version
? Too old image, no longer supported
? Unknown image format
= the images were written by another version of CRIU than this one reads
> use the CRIU of the checkpoint, or a newer one

image-damaged
? Magic doesn't match for (?P<what>\S+)
? Unexpected EOF on (?P<what>\S+)
? image file was truncated
? Images? corrupt
? corrupted image
? Failed unpacking object
? Reached EOF unexpectedly
? VMA-s are not sorted
= the images are damaged or not complete {what}
> take another checkpoint; kedge check finds damage in a store

image-parent
? No parent image found
? Invalid parent image directory
? Pid-reuse detection failed
= the images build on earlier ones that are not here
> keep the directory of the pre-dump beside them, at the same relative place

parasite
? Can't (?:infect|cure) \(pid: (?P<what>\d+)\)
? Can't (?:switch parasite|run parasite|inject syscall blob)
= CRIU's code could not run inside process {what}
> a seccomp filter or memory protection forbids it; use a newer CRIU, or run it with CAP_SYS_ADMIN

# What the runtime says when there is no log.

criu-missing
? exec: "?criu"?: executable file not found
? criu binary not found
? unable to execute CRIU
= CRIU is not installed
> install it (Debian 13: apt-get install criu); kedge container doctor says what is there

criu-too-old
? (?:CRIU|Criu) version (?:\S+ )?(?:must be|is too old|.*required)
= CRIU is older than the runtime wants
> install a newer one; kedge container doctor says which is there
"""
