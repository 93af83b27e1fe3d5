"""What only a GPU can show: python examples/gpu_check.py [--quick] [--json FILE]

1. Eager, compiled (CUDA graphs) and asynchronous engines emit the same tokens, and no step loses drafts to an error.
2. Steps never synchronise with the device: they run under torch.cuda.set_sync_debug_mode("error").
3. Compiled steps are graph replays: at least two cudaGraphLaunch calls a step are counted by the profiler.
4. Step times of a random target of Qwen3-4B's shape with a DSpark-shaped drafter, against the time of reading their
   weights and keys and values once at the measured copy bandwidth.
5. What running the n-gram drafter and never choosing it costs (the paper, section 5.6: at most 1.2 %).

Weights are random, so nothing is downloaded, and acceptance says nothing. Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from hspark import HybridSpeculator, SamplingParams
from hspark.drafters.dspark import DSparkDrafter
from hspark.drafters.dspark_config import DSparkConfig
from hspark.drafters.dspark_model import DSparkModel
from hspark.lab.machine import copy_bandwidth
from hspark.lab.overhead import NeverChoose
from hspark.policy import LinearCost

CUDA = torch.device("cuda")
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048}
LARGE = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
LARGE |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
DRAFT_LAYERS, DRAFT_TAPS = 5, (1, 9, 17, 25, 33)
CONTEXT = 512
COST = LinearCost(1.0, 0.001)


def random_target(sizes: dict[str, Any], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with CUDA:
            config = Qwen3Config(**sizes, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None)
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def random_drafter(target: Any, layers: int, taps: tuple[int, ...], dtype: torch.dtype) -> DSparkDrafter:
    """A DSpark drafter for a target, block size 7; it shares the target's tables."""
    sizes = target.config
    config = DSparkConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_layers=layers,
        num_heads=sizes.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        taps=taps,
        block_size=7,
        mask_token_id=sizes.vocab_size - 1,
        num_target_layers=sizes.num_hidden_layers,
        markov_rank=256,
        markov_head="vanilla",
        confidence_head=True,
        confidence_with_markov=True,
        max_positions=4096,
    )
    with CUDA:
        return DSparkDrafter(DSparkModel(config, tables=False).to(dtype))


def speculator(target: Any, drafter: Any, **settings: Any) -> HybridSpeculator:
    options = {"max_length": 1024, "cost": COST, "policy": "proposed", "budget_delay": 2}
    return HybridSpeculator(target, drafter=drafter, **{**options, **settings})


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Texts with repetitions, so that both drafters have something to say."""
    return [[(7 * row + i * i % 23) % (vocab - 2) for i in range(length)] for row in range(count)]


def check_equality() -> dict[str, Any]:
    target = random_target(SMALL, torch.float32)
    texts: dict[str, Any] = {}
    lost = 0
    for compiled in (False, True):
        for run_ahead in (0, 1):
            drafter = random_drafter(target, 2, (0, 2), torch.float32)
            engine = speculator(target, drafter, compile=compiled, run_ahead=run_ahead, max_batch_size=4)
            for temperature in (0.0, 0.8):
                params = SamplingParams(max_new_tokens=64, temperature=temperature, seed=1)
                outputs = engine.generate(prompts(6, 40, 2048), params)
                name = f"{'compiled' if compiled else 'eager'}, run_ahead {run_ahead}, T {temperature}"
                texts[name] = [output.token_ids for output in outputs]
            lost += engine.engine.draft_failures
    differing = [name for name in texts if texts[name] != texts[f"eager, run_ahead 0, T {name[-3:]}"]]
    return {"passed": not differing and not lost, "variants": len(texts), "differing": differing, "lost_drafts": lost}


def busy(spec: HybridSpeculator, batch: int, vocab: int, steps: int = 6) -> None:
    """Fills the rows with requests that go on for long, and warms up."""
    for prompt in prompts(batch, CONTEXT, vocab):
        spec.engine.submit(prompt, SamplingParams(max_new_tokens=500, ignore_eos=True))
    for _ in range(batch + steps):
        spec.engine.step()


def finish(spec: HybridSpeculator) -> None:
    for owner in list(spec.engine.owners):
        if owner is not None:
            spec.engine.cancel(owner)
    while spec.engine.has_work:
        spec.engine.step()
    if spec.engine.draft_failures:
        raise RuntimeError(f"{spec.engine.draft_failures} steps lost their drafts; the warning says why")


def check_no_sync(compiled: bool) -> dict[str, Any]:
    target = random_target(SMALL, torch.bfloat16)
    spec = speculator(target, random_drafter(target, 2, (0, 2), torch.bfloat16), compile=compiled, max_batch_size=4)
    busy(spec, 4, 2048, steps=30)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            spec.engine.step()
        # An engine outlives a drafter that raises, so a synchronisation there shows as drafts lost.
        return {"passed": not spec.engine.draft_failures, "lost_drafts": spec.engine.draft_failures}
    except RuntimeError as error:
        return {"passed": False, "error": str(error)[:300]}
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_replays() -> dict[str, Any]:
    target = random_target(SMALL, torch.bfloat16)
    spec = speculator(target, random_drafter(target, 2, (0, 2), torch.bfloat16), compile=True, max_batch_size=4)
    busy(spec, 4, 2048, steps=30)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        for _ in range(5):
            spec.engine.step()
        torch.cuda.synchronize()
    launches = sum(event.count for event in traced.key_averages() if event.key == "cudaGraphLaunch")
    lost = spec.engine.draft_failures
    return {"passed": launches >= 2 * 5 and not lost, "launches_per_step": launches / 5, "lost_drafts": lost}


def step_seconds(spec: HybridSpeculator, steps: int) -> float:
    """Median seconds of a step, waiting for the device after each."""
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        spec.engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def measure_steps(batches: list[int], steps: int, compiled: bool) -> list[dict[str, Any]]:
    bandwidth = copy_bandwidth(CUDA)
    target = random_target(LARGE, torch.bfloat16)
    weights = sum(parameter.nbytes for parameter in target.parameters())
    rows = []
    for batch in batches:
        for policy in ("vanilla", "model_only", "proposed"):
            drafter = None if policy == "vanilla" else random_drafter(target, DRAFT_LAYERS, DRAFT_TAPS, torch.bfloat16)
            drafts = 0 if drafter is None else sum(p.nbytes for p in drafter.source.parameters())
            spec = speculator(target, drafter, policy=policy, compile=compiled, max_batch_size=batch)
            busy(spec, batch, LARGE["vocab_size"])
            seconds = step_seconds(spec, steps)
            cached = spec.engine.target.buffers.num_bytes() * CONTEXT / 1024
            floor = (weights + drafts + cached) / bandwidth
            rows.append({"batch": batch, "policy": policy, "ms": seconds * 1e3, "floor_ms": floor * 1e3})
            rows[-1]["over_floor"] = seconds / floor
            finish(spec)
            del spec
            torch.cuda.empty_cache()
    return rows


def measure_never_choose(batches: list[int], rounds: int, compiled: bool) -> list[dict[str, Any]]:
    """model_only against the same with an n-gram drafter that is never chosen, in turns."""
    target = random_target(LARGE, torch.bfloat16)
    rows = []
    for batch in batches:
        specs = []
        for policy in ("model_only", NeverChoose()):
            drafter = random_drafter(target, DRAFT_LAYERS, DRAFT_TAPS, torch.bfloat16)
            specs.append(speculator(target, drafter, policy=policy, compile=compiled, max_batch_size=batch))
            busy(specs[-1], batch, LARGE["vocab_size"])
        times = [[step_seconds(spec, 5) for spec in specs] for _ in range(rounds)]
        overhead = statistics.median(never / plain - 1 for plain, never in times)
        rows.append({"batch": batch, "overhead_percent": 100 * overhead, "wanted_percent": 1.2})
        for spec in specs:
            finish(spec)
        del specs
        torch.cuda.empty_cache()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batches 1 and 4 only, fewer steps")
    parser.add_argument("--no-compile", action="store_true", help="measure eager steps")
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA GPU is visible here, so there is nothing to check.")
        return 0
    compiled = not options.no_compile
    batches, steps = ([1, 4], 10) if options.quick else ([1, 4, 32, 128], 30)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    checks = {
        "same tokens": check_equality,
        "no synchronisation, eager": lambda: check_no_sync(False),
        "no synchronisation, compiled": lambda: check_no_sync(True),
        "graph replays": check_replays,
    }
    print(f"{report['device']}, torch {report['torch']}")
    for name, check in checks.items():
        report[name] = check()
        print(f"{'passed' if report[name]['passed'] else 'FAILED'}  {name}: {report[name]}", flush=True)
    report["steps"] = measure_steps(batches, steps, compiled)
    print("batch  policy      ms/step  floor ms  over floor")
    for row in report["steps"]:
        print(
            f"{row['batch']:5d}  {row['policy']:10s} {row['ms']:8.2f} {row['floor_ms']:9.2f} {row['over_floor']:10.2f}x"
        )
    report["never chosen"] = measure_never_choose(batches, 10, compiled)
    for row in report["never chosen"]:
        print(f"batch {row['batch']}: never choosing costs {row['overhead_percent']:.2f} % (wanted: at most 1.2 %)")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0 if all(report[name]["passed"] for name in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
