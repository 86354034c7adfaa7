#!/bin/bash
# The units of share/kvtierd under a systemd of their own: units.sh BUILD. By hand: it needs root,
# Linux with cgroup2 and overlayfs, and systemd. Everything happens in namespaces, over a copy of
# the root directory that is thrown away. Exit 0 ok, 1 a step failed (the log is shown), 77 not here.
set -euo pipefail

here=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "${1:?usage: units.sh BUILD}" && pwd)
[ "$(id -u)" = 0 ] && [ -x /lib/systemd/systemd ] && grep -qw overlay /proc/filesystems || exit 77
cgroups=$(findmnt -n -o TARGET -t cgroup2 | head -n 1)
[ -n "$cgroups" ] || exit 77
work=$(mktemp -d)
group=$cgroups/kvtier-units.$$
mkdir "$group" "$work/out"
trap 'rm -rf --one-file-system "$work"; sleep 0.5; find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null' EXIT

# What docs/daemon.md says, step by step, by the first service of that systemd.
cat >"$work/out/check" <<'CHECK'
#!/bin/bash
set -eux -o pipefail
socket=/run/kvtier/kvtier.sock
pid() { systemctl show -p MainPID --value kvtierd; }
ask() { kvtier stat "unix:$socket" --json | grep daemon.version >/dev/null; }
install -D -m 644 /usr/local/share/kvtierd/kvtierd.sysusers /usr/lib/sysusers.d/kvtierd.conf
systemd-sysusers
install -D -m 644 /usr/local/share/kvtierd/kvtierd.conf /etc/kvtier/kvtierd.conf
sed -i 's/^dram = .*/dram = 96MiB/; s|^# disk = .*|disk = /var/lib/kvtier:256MiB|' \
    /etc/kvtier/kvtierd.conf
cp /usr/local/share/kvtierd/kvtierd.{service,socket} /etc/systemd/system/
systemctl daemon-reload
systemctl enable --now kvtierd.socket kvtierd.service
[ "$(stat -c '%U %a' $socket)" = "kvtier 600" ]
[ "$(stat -c '%U %a' /var/lib/kvtier)" = "kvtier 700" ]
[ "$(systemctl show -p StatusText --value kvtierd)" = serving ]
grep -q '^CapEff:.0*$' "/proc/$(pid)/status"
ask
check() { setpriv --reuid kvtier --regid kvtier --clear-groups kvtierd --config /etc/kvtier/kvtierd.conf --check; }
check | grep -q 'the configuration is good'
sed -i 's/^dram = .*/dram = 60TiB/' /etc/kvtier/kvtierd.conf
if check; then exit 1; fi
sed -i 's/^dram = .*/dram = 96MiB/' /etc/kvtier/kvtierd.conf
if kvtier purge "unix:$socket" --namespace 00112233445566778899aabbccddeeff --yes; then exit 1; fi
systemctl reload kvtierd
first=$(pid)
ask
kill -9 "$first"
for _ in $(seq 100); do sleep 0.1; [ "$(pid)" -gt 0 ] && [ "$(pid)" != "$first" ] && break; done
ask # also while it starts: the socket is systemd's
systemctl restart kvtierd
ask
systemctl stop kvtierd.service
[ "$(systemctl show -p Result --value kvtierd)" = success ]
[ "$(systemctl is-active kvtierd || true)" = inactive ]
ask # starts it
[ "$(systemctl is-active kvtierd)" = active ]
systemctl stop kvtierd.socket kvtierd.service
[ ! -e $socket ]
touch /out/passed
CHECK
chmod 755 "$work/out/check"

inside() {
    local root=$work/root unit
    mkdir "$work/over" "$root"
    mount -t tmpfs tmpfs "$work/over"
    mkdir "$work/over/up" "$work/over/work"
    mount -t overlay overlay -o "lowerdir=/,upperdir=$work/over/up,workdir=$work/over/work" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    for node in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0; do
        IFS=: read -r name major minor <<<"$node"
        mknod -m 666 "$root/dev/$name" c "$major" "$minor"
    done
    mkdir "$root"/dev/{pts,shm,mqueue,hugepages}
    mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    mount -t mqueue mqueue "$root/dev/mqueue"
    install -D -m 755 -t "$root/usr/local/bin" "$build/kvtierd" "$build/kvtier"
    mkdir -p "$root/usr/local/share/kvtierd" "$root/out"
    for file in "$here"/share/kvtierd/kvtierd.*; do
        sed 's|@KVT_BIN_DIR@|/usr/local/bin|' "$file" \
            >"$root/usr/local/share/kvtierd/$(basename "$file")"
    done
    mount --bind "$work/out" "$root/out"
    mount -t tmpfs tmpfs "$root/run"
    mount -t tmpfs tmpfs "$root/tmp"
    : >"$root/etc/fstab"
    for unit in udevd.service udev-trigger.service networkd.service resolved.service \
        timesyncd.service logind.service sysctl.service modules-load.service \
        random-seed.service remount-fs.service; do
        ln -sf /dev/null "$root/etc/systemd/system/systemd-$unit"
    done
    for unit in dev-hugepages dev-mqueue sys-kernel-debug sys-kernel-tracing; do
        ln -sf /dev/null "$root/etc/systemd/system/$unit.mount"
    done
    cat >"$root/etc/systemd/system/check.service" <<'UNIT'
[Unit]
DefaultDependencies=no
Requires=sysinit.target
After=basic.target
[Service]
Type=oneshot
ExecStart=/bin/sh -c '/out/check >/out/log 2>&1'
ExecStopPost=/bin/systemctl --no-block exit 0
UNIT
    cat >"$root/etc/systemd/system/check.target" <<'UNIT'
[Unit]
Requires=basic.target
Wants=check.service systemd-journald.service
After=basic.target
UNIT
    cd "$root"
    mkdir -p old
    pivot_root . old
    umount -l /old
    exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin container=other \
        /lib/systemd/systemd --system --unit=check.target --log-target=null --show-status=no
}
export -f inside
export here build work
(
    echo "$BASHPID" >"$group/cgroup.procs"
    exec timeout 120 unshare --mount --pid --fork --cgroup --uts --ipc --propagation private \
        bash -euo pipefail -c inside </dev/null >"$work/out/systemd" 2>&1
) || true
if [ ! -e "$work/out/passed" ]; then
    cat "$work/out/systemd" "$work/out/log" 2>/dev/null || true
    exit 1
fi
echo "units: installed, enabled, asked, reloaded, killed, restarted, stopped, started by the socket"
