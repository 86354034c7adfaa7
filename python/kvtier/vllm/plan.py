"""What the scheduler tells the workers, step by step (plain data: it crosses processes)."""
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Told:
    """What an event about the blocks of a Transfer says of them: the engine's own hashes, that of
    the block before, the tokens of all blocks, and the adapter."""

    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    lora_id: int | None = None
    lora_name: str | None = None


@dataclass
class Transfer:
    """Blocks of one request and group. hashes: of the chain's blocks, in order, one a page."""

    request: str
    hashes: list[bytes]
    pages: list[int]
    first_block: int = 0          # of the prompt: number of hashes[0]
    parent: bytes | None = None   # hash of the block before
    group: int = 0
    told: Told | None = None      # of blocks to be stored, when the engine publishes events


@dataclass
class Step:
    """One engine step. new_pages: pages that were handed out and will be computed; cancelled:
    requests that ended while their blocks were on their way; prefill: (new, cached) tokens when
    the step is nothing but one prompt being computed; idle: nothing is computed in this step; ask: the
    scheduler has not been told what each stage of a pipeline holds."""

    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    new_pages: list[int] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    prefill: tuple[int, int] | None = None
    idle: bool = False
    ask: bool = False
