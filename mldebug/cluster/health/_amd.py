"""AMD GPUs: amdsmi where it is installed, and sysfs for what it does not tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mldebug.cluster.health._finding import Finding, Node, bad, by, part, settle, unseen, warn
from mldebug.cluster.health._pci import AMD
from mldebug.cluster.health._root import NotVisible, Root

_DRM = "/sys/class/drm"


def load_amdsmi() -> tuple[Any, str]:
    """The library, ready to be asked, or None and why not."""
    try:
        import amdsmi  # type: ignore[import-not-found, unused-ignore]
    except Exception as exc:  # its library may be missing behind it
        return None, f"amdsmi is not installed ({type(exc).__name__})"
    try:
        amdsmi.amdsmi_init()
    except Exception as exc:
        return None, f"amdsmi does not start: {str(exc)[:120]}"
    return amdsmi, ""


def look(root: Root, library: Any = None, why: str = "") -> dict[str, Any]:
    """The AMD GPUs of sysfs, and what amdsmi says of each."""
    found = []
    for card in root.names(_DRM) if root.exists(_DRM) else []:
        folder = f"{_DRM}/{card}/device"
        if not re.fullmatch(r"card\d+", card) or root.maybe(f"{folder}/vendor") != AMD:
            continue
        try:
            bus = root.real(folder).rpartition("/")[2]
        except NotVisible:
            continue
        found.append({"card": card, "bus": bus, **_ras(root, folder), **_facts(root, folder)})
    if library is not None and found:
        for gpu, told in zip(found, _told(library), strict=False):
            gpu.update(told)
    return {"gpus": found, "smi": why or ("" if library is not None else "not asked")}


def _ras(root: Root, folder: str) -> dict[str, Any]:
    """Memory errors: lines `ue: 0` and `ce: 3`."""
    text = root.maybe(f"{folder}/ras/umc_err_count")
    if text is None:
        return {}
    rows = dict(re.findall(r"^(ue|ce): (\d+)", text, re.M))
    return {"uncorrected": int(rows.get("ue", 0)), "corrected": int(rows.get("ce", 0))}


def _facts(root: Root, folder: str) -> dict[str, Any]:
    names = {
        "vbios": "vbios_version",
        "name": "product_name",
        "speed": "current_link_speed",
        "width": "current_link_width",
        "max_width": "max_link_width",
        "max_speed": "max_link_speed",
        "xgmi_error": "xgmi_error",
        "device": "device",
    }
    found = {fact: root.maybe(f"{folder}/{file}") for fact, file in names.items()}
    return {fact: text for fact, text in found.items() if text}


def _told(library: Any) -> list[dict[str, Any]]:
    rows = []
    for handle in library.amdsmi_get_processor_handles():
        row: dict[str, Any] = {}
        try:
            counts = library.amdsmi_get_gpu_total_ecc_count(handle)
            row = {"uncorrected": int(counts["uncorrectable_count"]), "corrected": int(counts["correctable_count"])}
        except Exception as exc:
            row["ecc_why"] = str(exc)[:120]
        rows.append(row)
    return rows


def judge(node: Node) -> Iterator[Finding]:
    """Memory errors, width of links, and uniformity of AMD GPUs."""
    seen = part(node, "amd") or {}
    found = seen.get("gpus") or []
    if not found:
        return
    check = "AMD GPUs"
    troubles = []
    for gpu in found:
        place = gpu["card"]
        if gpu.get("uncorrected"):
            troubles.append(
                bad(
                    check,
                    f"{gpu['uncorrected']} uncorrected memory errors",
                    "drain the node, `amd-smi bad-pages`, reset the GPU",
                    place,
                )
            )
        if (
            gpu.get("width", "").isdecimal()
            and gpu.get("max_width", "").isdecimal()
            and int(gpu["width"]) < int(gpu["max_width"])
        ):
            troubles.append(
                warn(check, f"its link has x{gpu['width']} of x{gpu['max_width']}", "reseat the card or riser", place)
            )
        if gpu.get("xgmi_error", "0").strip() not in ("0", ""):
            troubles.append(
                warn(check, f"XGMI reports errors ({gpu['xgmi_error'][:40]})", "`amd-smi xgmi`; reset the GPU", place)
            )
    models = by(found, lambda gpu: gpu.get("name") or gpu.get("device") or "GPU")
    yield from settle(check, troubles, ", ".join(f"{len(group)} x {model}" for model, group in models.items()))
    if seen.get("smi"):
        yield unseen("AMD GPUs", f"more than sysfs tells: {seen['smi']}", "install amdsmi of your ROCm")
    files = part(node, "container", "amd_files") or []
    if "kfd" not in files:
        yield warn(
            check,
            "there is no /dev/kfd, and ROCm does not start without it",
            "docker: --device=/dev/kfd --device=/dev/dri",
        )
