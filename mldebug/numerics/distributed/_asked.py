"""What the ranks ask of the store, and write there once for all: who is here, how they vote, who is ready."""

from __future__ import annotations

from typing import Any


def ranks_here(store: Any) -> int:
    """How many ranks take part."""
    return int(store.add("hello", 0) - store.add("gone", 0))


def vote(store: Any, at: str, bad: bool) -> str:
    if bad:
        return str(store.compare_set(f"{at}/answer", "", "drop").decode())
    if store.add(f"{at}/fine", 1) >= store.add("hello", 0):
        return str(store.compare_set(f"{at}/answer", "", "keep").decode())
    return ""


def answer_to(store: Any, at: str, late: bool) -> str:
    if store.check([f"{at}/answer"]):
        return str(store.get(f"{at}/answer").decode())
    # Somebody will not come (any more).
    if late or store.add("gone", 0) or store.add("joined", 0) or store.add("abstain", 0):
        return str(store.compare_set(f"{at}/answer", "", "alone from here").decode())
    return ""


def declare(store: Any, at: str, size: int, refused: str) -> None:
    if refused:
        store.compare_set(f"{at}/answer", "", f"on one rank {refused}")
    elif store.add(f"{at}/ready", 1) >= size:
        store.compare_set(f"{at}/answer", "", "go")


def decision(store: Any, at: str, late: bool) -> str:
    if late:
        return str(store.compare_set(f"{at}/answer", "", "not all ranks were ready for it").decode())
    return str(store.get(f"{at}/answer").decode()) if store.check([f"{at}/answer"]) else ""


def together_or_alone(store: Any, size: int, late: bool) -> str:
    if store.check(["batches"]):
        return str(store.get("batches").decode())
    abstain = store.add("abstain", 0) > 0
    if late or abstain or store.add("hello", 0) >= size:
        said = "alone" if abstain or store.add("hello", 0) < size else "together"
        return str(store.compare_set("batches", "", said).decode())
    return ""
