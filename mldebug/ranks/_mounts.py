"""Whether a path is on a file system of this node, or on one that nodes share, by the type of its mount."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from mldebug.core.errors import MldebugError

Kind = Literal["local", "shared", "unknown"]


@dataclass(frozen=True)
class Mount:
    """The mount that a path is on. `source` is the device or the server; `upper` where an overlay writes to."""

    point: str
    type: str
    source: str = ""
    upper: str = ""


def kind_of(path: str | os.PathLike[str], mounts: list[Mount] | None = None) -> tuple[Kind, Mount]:
    """Say "local", "shared" or "unknown" for the path, and its mount. The path need not exist yet.

    "local" is what other nodes do not see. An overlay is what its upper layer is, if that can be seen from here: in a
    container it cannot, and the layer is then the node's own.

        kind, mount = kind_of("/data/cache")
    """
    found = mounts if mounts is not None else read_mounts()
    mount = mount_of(path, found)
    if mount.type in _OVERLAYS and mount.upper:
        below = mount_of(mount.upper, found)
        if below.type not in _OVERLAYS and _kind(below) == "shared":
            return "shared", below
    return _kind(mount), mount


def mount_of(path: str | os.PathLike[str], mounts: list[Mount]) -> Mount:
    """The mount whose point is the longest that leads to the path; of those on one point, the last (it hides others).

    Links are followed; what does not exist yet is taken as if it did, in the folder that does.
    """
    real = os.path.realpath(path)
    best = None
    for one in mounts:
        inside = one.point == "/" or real == one.point or real.startswith(one.point + "/")
        if inside and (best is None or len(one.point) >= len(best.point)):
            best = one
    if best is None:
        raise MldebugError(f"no mount leads to {real}", "look at /proc/self/mountinfo")
    return best


def read_mounts(text: str | None = None) -> list[Mount]:
    """The mounts that this process sees, from /proc/self/mountinfo."""
    if text is None:
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
                text = stream.read()
        except OSError as exc:
            raise MldebugError(
                f"cannot tell local from shared file systems: /proc/self/mountinfo cannot be read ({exc.strerror})",
                "use main_process_first() for a shared folder, local_main_process_first() for one of the node",
            ) from None
    found = []
    for line in text.splitlines():
        # id parent device root POINT options [fields ...] - TYPE SOURCE super-options
        left, _, right = line.partition(" - ")
        words, tail = left.split(" "), right.split(" ")
        if len(words) >= 6 and len(tail) >= 2:
            upper = re.search(r"(?:^|,)upperdir=((?:[^,\\]|\\.)*)", tail[2] if len(tail) > 2 else "")
            found.append(Mount(_plain(words[4]), tail[0], _plain(tail[1]), _plain(upper.group(1)) if upper else ""))
    return found


def _plain(word: str) -> str:
    """The kernel writes spaces, tabs, line ends and backslashes of names as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), word)


_OVERLAYS = {"overlay", "aufs", "fuse.fuse-overlayfs", "fuse-overlayfs"}

_LOCAL = {
    "ext", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "reiser4", "bcachefs", "nilfs2",
    "ntfs", "ntfs3", "fuseblk", "vfat", "exfat", "msdos", "hfs", "hfsplus", "apfs", "ufs", "iso9660", "udf", "squashfs",
    "erofs", "cramfs", "romfs", "tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs", "proc", "sysfs", "devpts",
    "cgroup", "cgroup2", "fuse.squashfuse", "fuse.squashfuse_ll", "fuse.lxcfs", *_OVERLAYS,
}  # fmt: skip

_SHARED = {
    "nfs", "nfs4", "nfs3", "lustre", "lustre_lite", "gpfs", "mmfs", "beegfs", "beegfs_nodev", "fhgfs", "ceph",
    "fuse.ceph", "fuse.ceph-fuse", "cifs", "smb", "smb2", "smb3", "smbfs", "wekafs", "weka", "panfs", "daos",
    "fuse.daos", "fuse.dfuse", "pvfs2", "orangefs", "afs", "openafs", "auristorfs", "coda", "ocfs2", "gfs", "gfs2",
    "vast", "quobyte", "fuse.quobyte", "glusterfs", "fuse.glusterfs", "moosefs", "fuse.mfs",
    "fuse.lizardfs", "fuse.saunafs", "fuse.juicefs", "juicefs", "fuse.s3fs", "fuse.s3ql", "fuse.goofys", "fuse.geesefs",
    "fuse.mount-s3", "fuse.mountpoint-s3", "fuse.gcsfuse", "fuse.blobfuse", "fuse.blobfuse2", "fuse.blobfuse2v2",
    "fuse.rclone", "fuse.sshfs", "sshfs", "fuse.hdfs", "fuse.fuse_dfs", "fuse.alluxio-fuse", "fuse.alluxio",
    "fuse.cvmfs2", "cvmfs2", "cvmfs", "fuse.seaweedfs", "fuse.objectivefs", "fuse.oss", "fuse.ossfs", "fuse.cosfs",
    "fuse.obsfs", "fuse.curlftpfs", "davfs", "fuse.davfs", "fuse.davfs2", "dvs", "cxfs",
    "stornext", "snfs", "acfs", "fuse.onedata", "fuse.gfarm2fs", "fuse.yas3fs", "fuse.xtreemfs",
}  # fmt: skip

# By these nobody can say, as by any type that is not listed: a folder of the host in a virtual machine or a sandbox,
# and views of other folders, have behind them a disk of the node or a shared one.
_UNKNOWN = {
    "9p", "virtiofs", "vboxsf", "prl_fs", "fuse", "fuse.mergerfs", "mergerfs", "fuse.bindfs", "fuse.unionfs",
    "fuse.gocryptfs", "fuse.encfs", "ecryptfs", "autofs",
}  # fmt: skip


def _kind(mount: Mount) -> Kind:
    name = mount.type.lower()
    if name in _UNKNOWN:
        return "unknown"
    if name in _SHARED:
        return "shared"
    return "local" if name in _LOCAL else "unknown"
