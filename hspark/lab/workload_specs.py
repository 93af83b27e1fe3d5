"""The paper's workloads as settings: where each is published, its columns, and the paper's filters (Table 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class WorkloadSpec:
    """Where a workload is published, how its rows read, and the paper's filters.

    name: the key in `PAPER_WORKLOADS`. title: its name in the paper.
    hub, config, split: where it is on the hub.
    fields: what a row must hold, by role: the column's name in the published layout.
    kind: "edit" (an instruction and a program), "prompt" (a ready prompt with the program in it) or "chat".
    max_new_tokens: the paper's output limit (Table 4); None for one per prompt, see `PaperWorkload.output_limits`.
    min_input_chars: programs must be longer than this. reference_distance: least and most normalised edit distance
    from the program to the reference. take: how many the paper took of a larger set.
    max_bucket: the upper end, in per cent, of the buckets that Table 4 lists; None for a workload without buckets.
    min_bucket_samples: smaller buckets are dropped. max_context_tokens: prompt plus output. distinct: repeated prompts
    are dropped. paper_size: how many requests the paper has after its filters (Table 4; of the whole set for
    SPEED-Bench), to hold a report against.
    """

    name: str
    title: str
    hub: str
    split: str
    fields: Mapping[str, str]
    kind: str
    max_new_tokens: int | None
    paper_size: int
    config: str | None = None
    min_input_chars: int | None = None
    reference_distance: tuple[float, float] | None = None
    take: int | None = None
    max_bucket: int | None = None
    min_bucket_samples: int = 10
    max_context_tokens: int | None = None
    distinct: bool = False


_BLAZEDIT = MappingProxyType({"instruction": "change_request", "input": "code", "distance": "norm_distance"})
_CANITEDIT = MappingProxyType(
    {"id": "id", "instruction": "instruction_descriptive", "input": "before", "output": "after"}
)
_EDITBENCH = MappingProxyType(
    {
        "id": "problem_id",
        "instruction": "instruction",
        "input": "original_code",
        "selection": "highlighted_code",
        "language": "programming_language",
    }
)
_INSTRUCTCODER = MappingProxyType({"instruction": "instruction", "input": "input", "output": "output"})
_TURNS = MappingProxyType({"id": "question_id", "turns": "turns", "group": "category"})
_LONG_EDIT: dict[str, Any] = {"kind": "edit", "min_input_chars": 1000}


def _speed_bench(size: str) -> WorkloadSpec:
    name, hub = f"speed-bench-{size}", "nvidia/SPEED-Bench"
    config = f"throughput_{size}"
    return WorkloadSpec(name, f"SPEED-Bench {size}", hub, "test", _TURNS, "chat", 512, 1530, config, distinct=True)


_SPECS = (
    WorkloadSpec(
        "blazedit-5k", "Blazedit 5k", "vdaita/edit_5k_char", "train", _BLAZEDIT,
        max_new_tokens=4096, paper_size=21, reference_distance=(0.05, 0.25), **_LONG_EDIT,
    ),
    WorkloadSpec(
        "blazedit-10k", "Blazedit 10k", "vdaita/edit_10k_char", "train", _BLAZEDIT,
        max_new_tokens=4096, paper_size=19, reference_distance=(0.05, 0.25), **_LONG_EDIT,
    ),
    WorkloadSpec(
        "canitedit", "CanItEdit", "nuprl/CanItEdit", "test", _CANITEDIT,
        max_new_tokens=None, paper_size=30, reference_distance=(0.05, 0.25), **_LONG_EDIT,
    ),
    WorkloadSpec(
        "nextcoder", "NextCoder", "microsoft/NextCoderDataset", "train",
        MappingProxyType({"prompt": "prompt", "output": "completion"}), "prompt",
        max_new_tokens=4096, paper_size=4000, min_input_chars=1000, take=4000, max_bucket=70,
    ),
    WorkloadSpec(
        "editbench", "EditBench", "copilot-arena/editbench", "complete", _EDITBENCH,
        max_new_tokens=4096, paper_size=520, max_bucket=25, max_context_tokens=6000, **_LONG_EDIT,
    ),
    WorkloadSpec(
        "instructcoder", "InstructCoder", "likaixin/InstructCoder", "train", _INSTRUCTCODER, "edit",
        max_new_tokens=200, paper_size=3200, take=3200,
    ),
    WorkloadSpec("mt-bench", "MT-Bench", "philschmid/mt-bench", "train", _TURNS, "chat", 256, 80),
    *map(_speed_bench, ("1k", "2k", "8k")),
)  # fmt: skip

PAPER_WORKLOADS: Mapping[str, WorkloadSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
