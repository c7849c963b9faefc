"""Local or shared: by lines of /proc/self/mountinfo as machines have them, and by real mounts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mldebug.core.errors import MldebugError
from mldebug.ranks._mounts import kind_of, mount_of, read_mounts

from .rank_kit import clean

MOUNTINFO = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
23 22 0:21 / /proc rw,relatime - proc proc rw
24 22 0:22 / /dev/shm rw,nosuid - tmpfs tmpfs rw
30 22 0:40 / /home rw,relatime shared:3 master:2 - nfs4 10.0.0.1:/export/home rw,vers=4.2,addr=10.0.0.1
31 30 254:1 / /home/me/scratch rw - xfs /dev/nvme0n1 rw
32 22 0:41 / /lustre/fs1 rw - lustre 10.1.1.1@o2ib:/fs1 rw,flock
33 22 0:42 / /gpfs rw - gpfs gpfs0 rw
34 22 0:43 / /bee rw - beegfs beegfs_nodev rw
35 22 0:44 / /ceph rw - ceph 1.2.3.4:6789:/ rw
36 22 0:45 / /cifs rw - cifs //server/share rw
37 22 0:46 / /smb rw - smb3 //server/share rw
38 22 0:47 / /mnt/s3\040bucket rw - fuse.s3fs s3fs rw
39 22 0:48 / /gcs rw - fuse.gcsfuse bucket rw
40 22 0:49 / /juice rw - fuse.juicefs JuiceFS:vol rw
41 22 0:50 / /ssh rw - fuse.sshfs host:/x rw
42 22 0:51 / /merger rw - fuse.mergerfs a:b rw
43 22 0:52 / /nine rw - 9p host rw
44 22 0:53 / /virtio rw - virtiofs tag rw
45 22 0:54 / /weka rw - wekafs be/default rw
46 22 0:55 / /panfs rw - panfs panfs://x rw
47 22 0:56 / /daos rw - fuse.daos dfuse rw
48 22 0:57 / /pvfs rw - pvfs2 tcp://x rw
49 22 0:58 / /afs rw - afs AFS rw
50 22 0:59 / /zfs rw - zfs pool/data rw
51 22 0:60 / /btrfs rw - btrfs /dev/sdb rw
52 22 0:61 / /new rw - shinyfs shiny rw
53 22 0:62 / /overlay/local rw - overlay overlay rw,lowerdir=/a:/b,upperdir=/var/up\040per,workdir=/var/work
54 22 0:63 / /overlay/nfs rw - overlay overlay rw,lowerdir=/a,upperdir=/home/me/up,workdir=/home/me/work
55 22 0:64 / /overlay/none ro - overlay overlay ro,lowerdir=/a:/b
56 22 0:40 /sub /data/bind rw - nfs4 10.0.0.1:/export/home rw
57 22 0:65 / /twice rw - tmpfs tmpfs rw
58 57 0:66 / /twice rw - nfs server:/x rw
59 22 0:67 / /back\134slash rw - vast server:/x rw
broken line
""".strip()


@pytest.mark.parametrize(
    ("path", "kind", "type_"),
    [
        ("/var/lib/x", "local", "ext4"),
        ("/dev/shm/x", "local", "tmpfs"),
        ("/home/you", "shared", "nfs4"),
        ("/home", "shared", "nfs4"),
        ("/homes", "local", "ext4"),  # a name that only begins alike
        ("/home/me/scratch/a/b", "local", "xfs"),
        ("/home/me/scratchy", "shared", "nfs4"),
        ("/lustre/fs1/x", "shared", "lustre"),
        ("/gpfs/x", "shared", "gpfs"),
        ("/bee/x", "shared", "beegfs"),
        ("/ceph/x", "shared", "ceph"),
        ("/cifs/x", "shared", "cifs"),
        ("/smb/x", "shared", "smb3"),
        ("/mnt/s3 bucket/x", "shared", "fuse.s3fs"),
        ("/gcs/x", "shared", "fuse.gcsfuse"),
        ("/juice/x", "shared", "fuse.juicefs"),
        ("/ssh/x", "shared", "fuse.sshfs"),
        ("/merger/x", "unknown", "fuse.mergerfs"),
        ("/nine/x", "unknown", "9p"),
        ("/virtio/x", "unknown", "virtiofs"),
        ("/weka/x", "shared", "wekafs"),
        ("/panfs/x", "shared", "panfs"),
        ("/daos/x", "shared", "fuse.daos"),
        ("/pvfs/x", "shared", "pvfs2"),
        ("/afs/x", "shared", "afs"),
        ("/zfs/x", "local", "zfs"),
        ("/btrfs/x", "local", "btrfs"),
        ("/new/x", "unknown", "shinyfs"),
        ("/overlay/local/x", "local", "overlay"),
        ("/overlay/nfs/x", "shared", "nfs4"),
        ("/overlay/none/x", "local", "overlay"),
        ("/data/bind/x", "shared", "nfs4"),
        ("/twice/x", "shared", "nfs"),  # what was mounted last hides the other
        ("/back\\slash/x", "shared", "vast"),
        ("/home/me/../../gpfs/x", "shared", "gpfs"),
    ],
)
def test_kinds(path: str, kind: str, type_: str) -> None:
    found, mount = kind_of(path, read_mounts(MOUNTINFO))
    assert (found, mount.type) == (kind, type_)


def test_links_are_followed(tmp_path) -> None:
    (tmp_path / "link").symlink_to("/gpfs/deep")
    assert kind_of(tmp_path / "link" / "new", read_mounts(MOUNTINFO))[0] == "shared"


def test_a_relative_path_is_of_the_current_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    mounts = read_mounts(f"{MOUNTINFO}\n60 22 0:99 / {tmp_path} rw - lustre x rw")
    assert kind_of("data/new", mounts)[0] == "shared"


def test_without_mounts() -> None:
    with pytest.raises(MldebugError, match="no mount leads to /x"):
        mount_of("/x", [])


def test_this_machine() -> None:
    assert kind_of("/proc/self")[1].type == "proc"
    assert kind_of("/proc/self")[0] == "local"


IN_A_NAMESPACE = """
import os, subprocess, sys
from mldebug.ranks._mounts import kind_of
base = sys.argv[1]
def mount(*args): subprocess.run(["mount", *args], check=True)
for name in ("lower", "up", "work", "over", "tmp fs", "bound", "src"):
    os.makedirs(f"{base}/{name}")
mount("-t", "tmpfs", "none", f"{base}/tmp fs")
for name in ("up", "work"):
    os.makedirs(f"{base}/tmp fs/{name}")
mount("-t", "overlay", "overlay", "-o",
      f"lowerdir={base}/lower,upperdir={base}/tmp fs/up,workdir={base}/tmp fs/work", f"{base}/over")
os.makedirs(f"{base}/tmp fs/deep")
mount("--bind", f"{base}/tmp fs/deep", f"{base}/bound")
os.symlink(f"{base}/tmp fs", f"{base}/link")
for path in ("tmp fs", "tmp fs/not/yet", "over/x", "bound/x", "link/x", "src"):
    kind, mount_ = kind_of(f"{base}/{path}")
    print(path, "|", kind, mount_.type, mount_.point[len(base):], mount_.upper[len(base):])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for mounts in a namespace of its own")
def test_real_mounts(tmp_path) -> None:
    command = ["unshare", "-m", sys.executable, "-c", IN_A_NAMESPACE, str(tmp_path)]
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, check=False)
    if "ermission denied" in done.stderr or "not permitted" in done.stderr:
        pytest.skip("mounts are not permitted here")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:5] == [
        "tmp fs | local tmpfs /tmp fs ",
        "tmp fs/not/yet | local tmpfs /tmp fs ",
        "over/x | local overlay /over /tmp fs/up",
        "bound/x | local tmpfs /bound ",
        "link/x | local tmpfs /tmp fs ",
    ]
    assert "tmpfs /tmp fs" not in lines[5]
