#!/usr/bin/env bash
# podman_counter.sh freeze|thaw|ctr WORK ARCHIVE: a counter in a podman container, frozen into ARCHIVE or brought back
# from it; with ctr, the same image in a containerd of its own, frozen into ARCHIVE by ctr.
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
  ctr)
    engine save -q --format oci-archive -o "$work/image.tar" localhost/counter:1
    cat >"$work/containerd.toml" <<END
version = 2
root = "$work/c/root"
state = "$work/c/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "$work/c/socket"
END
    containerd -c "$work/containerd.toml" >"$work/containerd.log" 2>&1 &
    daemon=$!
    trap 'kill $daemon; wait $daemon || :' EXIT
    client() { ctr -a "$work/c/socket" "$@"; }
    until client version >/dev/null 2>&1; do sleep 0.05; done
    client images import "$work/image.tar"
    id=archive-$$ # the runtime's own directory is shared by all containerds of a machine
    client run -d --null-io localhost/counter:1 $id /counter
    until [ -s "$work/c/state/io.containerd.runtime.v2.task/default/$id/rootfs/data.log" ]; do sleep 0.02; done
    name=$(client tasks checkpoint $id)
    client images export --skip-manifest-json --all-platforms "$archive" "$name"
    client tasks kill -s 9 $id
    until client tasks rm $id; do sleep 0.05; done
    client containers rm $id
    ;;
esac
