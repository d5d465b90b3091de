#!/usr/bin/env bash
# podman_counter.sh freeze|thaw WORK ARCHIVE: a counter in a podman container, frozen into ARCHIVE or brought back from it.
# Run in network and mount namespaces of its own: what CRIU locks there ends with them.
set -euo pipefail
work=$2 archive=$3
ip link set lo up
mount --make-rprivate /
engine() {
  podman --root "$work/root" --runroot "$work/run" --tmpdir "$work/tmp" --cgroup-manager cgroupfs \
    --runtime /usr/sbin/runc --events-backend none "$@"
}
case $1 in
  freeze)
    mkdir -p "$work/rootfs"/{etc,dev,proc,sys,run,tmp}
    gcc -static -O1 -o "$work/rootfs/counter" "$work/counter.c"
    echo hello >"$work/rootfs/etc/gone"
    tar -C "$work/rootfs" -cf "$work/rootfs.tar" .
    engine import -q -c 'CMD ["/counter"]' "$work/rootfs.tar" localhost/counter:1
    engine run -d --name counter --network none --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 \
      --env TOKEN=secret localhost/counter:1
    log=$(engine mount counter)/data.log
    until [ "$(wc -l 2>/dev/null <"$log" || echo 0)" -ge 5 ]; do sleep 0.02; done
    engine container checkpoint counter --export "$archive"
    wc -l <"$log" >"$work/frozen-at"
    engine rm -f counter
    ;;
  thaw)
    engine container restore --import "$archive"
    root=$(engine mount counter)
    for _ in $(seq 500); do
      [ "$(wc -l <"$root/data.log")" -lt $(($(cat "$work/frozen-at") + 5)) ] || break
      sleep 0.02
    done
    cp "$root/data.log" "$work/data.log"
    [ ! -e "$root/etc/gone" ] || touch "$work/came-back"
    engine kill counter
    engine rm -f counter
    ;;
esac
