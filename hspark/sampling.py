"""The one logits → log-probabilities function of the package, and its counter-based noise.

Target, drafters and plain decoding all call `target_log_probs`, so temperature, filters and penalties mean the same
thing everywhere. Noise is a pure function of (seed, position, token id, stream): it needs no state, survives any
batching, and two parties that ask for the same noise get the same noise (which is what couples them).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

# At or below this temperature a request is greedy, everywhere: drafting, verification and reporting share it.
GREEDY_TEMPERATURE = 1e-5

# Independent noise streams. The coupled stream is shared between target and drafter on purpose.
STREAM_COUPLED, STREAM_DRAFT, STREAM_ACCEPT, STREAM_RECOVER = 0, 1, 2, 3


# Keys of `slot_key` leave room for this many slots behind one anchor.
SLOTS_PER_ANCHOR = 1024
# Most probable tokens among which a CPU looks for the last one that top-k, top-p and min-p keep.
RANKED = 1024
# Elements of a row whose largest a CPU finds at a time, at most; vocabularies are multiples of a good part of it.
ARGMAX_BLOCK = 512
# Elements of noise that a CPU works out at a time.
CACHED_ELEMENTS = 1 << 16


class SamplingState(NamedTuple):
    """Sampling parameters of R rows, as tensors. V is the vocabulary size.

    temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: float32 [R].
    top_k: int64 [R], 0 for off.  seed: int64 [R].
    bias: float32 [R, V] added to the logits, or None while no request uses it.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seed: Tensor
    bias: Tensor | None = None

    @staticmethod
    def defaults(rows: int, device: torch.device | str = "cpu") -> SamplingState:
        """Greedy decoding without filters for `rows` rows."""

        def full(value: float) -> Tensor:
            return torch.full((rows,), value, dtype=torch.float32, device=device)

        def zeros() -> Tensor:
            return torch.zeros(rows, dtype=torch.int64, device=device)

        return SamplingState(full(0.0), zeros(), full(1.0), full(0.0), full(1.0), full(0.0), full(0.0), zeros())

    def take(self, rows: Tensor) -> SamplingState:
        """The parameters of `rows` (int64 [N]), in that order: one entry per packed slot."""
        taken: dict[str, Any] = {name: None if x is None else x[rows] for name, x in self._asdict().items()}
        return SamplingState(**taken)


class SamplingMode(NamedTuple):
    """Which parts of the processing any running request needs: static flags, known to the host.

    A step compiled or run for one mode does no work for the parts that are off.
    """

    sampled: bool = False  # some row has a temperature above GREEDY_TEMPERATURE
    filters: bool = False  # some row uses top_k, top_p or min_p
    penalties: bool = False  # some row uses a repetition, presence or frequency penalty
    bias: bool = False  # some row uses logit_bias

    def merge(self, other: SamplingMode) -> SamplingMode:
        return SamplingMode(*(a or b for a, b in zip(self, other, strict=True)))


class TokenCounts(NamedTuple):
    """Occurrences behind each slot, for penalties. in_prompt bool [N, V]; in_output int64/float [N, V]."""

    in_prompt: Tensor
    in_output: Tensor


def argmax(scores: Tensor) -> Tensor:
    """int64 [...]: index of the largest of scores [..., V], the lowest index among equals. NaN counts as largest.

    On a CPU `max` is several times faster than `argmax` and returns the same index, and finding the block that holds
    the largest first takes half the time of `max`, as no index has to be carried along.
    """
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    block = math.gcd(scores.shape[-1], ARGMAX_BLOCK)
    if block < ARGMAX_BLOCK // 4 or scores.shape[-1] == block or torch.compiler.is_compiling():
        return scores.max(dim=-1).indices
    blocks = scores.unflatten(-1, (-1, block))
    first = blocks.amax(dim=-1).max(dim=-1).indices
    within = blocks.take_along_dim(first[..., None, None], dim=-2).squeeze(-2)
    return first * block + within.max(dim=-1).indices


def process_logits(logits: Tensor, state: SamplingState, mode: SamplingMode, counts: TokenCounts | None) -> Tensor:
    """Logits [N, V] after bias and penalties, float32, before temperature and filters.

    Repetition penalty divides positive and multiplies negative logits of tokens seen in prompt or output; presence
    and frequency penalties subtract for tokens seen in the output (the definitions of the OpenAI API). The bias is
    added last, so that a bias of -100 bans a token whatever the penalties do.
    """
    logits = logits.float()
    if mode.penalties:
        if counts is None:
            raise ValueError("counts is None, but mode.penalties is set: pass the TokenCounts of the slots")
        seen = counts.in_prompt | (counts.in_output > 0)
        factor = torch.where(seen, state.repetition_penalty[:, None], 1.0)
        logits = torch.where(logits > 0, logits / factor, logits * factor)
        logits = logits - state.frequency_penalty[:, None] * counts.in_output
        logits = logits - state.presence_penalty[:, None] * (counts.in_output > 0)
    if mode.bias and state.bias is not None:
        logits = logits + state.bias
    return logits


def filter_log_probs(log_probs: Tensor, state: SamplingState) -> Tensor:
    """log_probs [N, V] with tokens outside top-k, top-p and min-p at -inf, renormalised. At least one token stays.

    The filters apply in that order, each to what the one before left; ties at a boundary of top-k are kept, so that
    the result does not depend on the order of token ids.
    """
    floor = None
    if log_probs.device.type == "cpu" and not torch.compiler.is_compiling() and log_probs.shape[-1] > RANKED:
        # Sorting a vocabulary takes longer than a layer of a small model, and the filters mostly keep its top.
        floor, found = _floor(log_probs.topk(RANKED, dim=-1).values, state, whole=False)
        floor = floor if bool(found.all()) else None
    if floor is None:
        floor, _ = _floor(log_probs.sort(dim=-1, descending=True).values, state, whole=True)
    kept = torch.where(log_probs >= floor, log_probs, -math.inf).log_softmax(dim=-1)
    # Bit for bit, so that a row without filters does not depend on who else is in its batch.
    unfiltered = (state.top_k <= 0) & (state.top_p >= 1.0) & (state.min_p <= 0)
    return torch.where(unfiltered[:, None], log_probs, kept)


def _floor(ranked: Tensor, state: SamplingState, *, whole: bool) -> tuple[Tensor, Tensor]:
    """The smallest log-probability that passes the filters [N, 1], from the largest ones in descending order [N, K].

    whole: these are all there are. Else the second value, bool [N], tells for which rows they were enough; there the
    floor is the same to the last bit, as every sum runs from the most probable token on.
    """
    count = ranked.shape[-1]
    limited, nucleus = state.top_k > 0, state.top_p < 1.0
    kth = ranked.gather(-1, (state.top_k.clamp(1, count) - 1)[:, None])
    kth = torch.where(limited[:, None], kth, -math.inf)
    mass = torch.where(ranked >= kth, ranked, -math.inf).exp()
    reached = mass.cumsum(dim=-1)
    share = state.top_p * torch.where(limited, reached[:, -1], 1.0)
    # A token is in the nucleus iff the mass before it is below top_p; the first always is.
    inside = reached - mass < share[:, None]
    inside[:, 0] = True
    last = torch.where(inside & (ranked >= kth), ranked, math.inf).amin(dim=-1, keepdim=True)
    floor = torch.where(nucleus[:, None], last, kth)
    min_p = state.min_p[:, None]
    floor = torch.where(min_p > 0, torch.maximum(floor, ranked[:, :1] + min_p.log()), floor)
    if whole:
        return floor, torch.ones_like(limited)
    return floor, torch.where(limited, kth[:, 0] > ranked[:, -1], ~nucleus | (reached[:, -1] >= share))


def target_log_probs(
    logits: Tensor, state: SamplingState, mode: SamplingMode, counts: TokenCounts | None = None
) -> Tensor:
    """The law that a request samples from: float32 log-probabilities [N, V] of slots with logits [N, V].

    `state` holds one entry per slot (`SamplingState.take`). Order: penalties, bias, temperature, top-k, top-p, min-p.
    A greedy slot (temperature <= GREEDY_TEMPERATURE) gets a point mass on its argmax, the lowest id among equals.
    NaN logits give NaN rows: callers report them, they are never sampled silently.
    """
    logits = process_logits(logits, state, mode, counts)
    greedy = state.temperature <= GREEDY_TEMPERATURE
    best = argmax(logits)[:, None]
    point = torch.full_like(logits, -math.inf).scatter_(-1, best, 0.0)
    point = torch.where(logits.isnan().any(dim=-1, keepdim=True), math.nan, point)
    if not mode.sampled:
        return point
    heat = torch.where(greedy, 1.0, state.temperature)[:, None]
    log_probs = (logits / heat).log_softmax(dim=-1)
    if mode.filters:
        log_probs = filter_log_probs(log_probs, state)
    return torch.where(greedy[:, None], point, log_probs)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, in place: `x` (int64) is a temporary of the caller's, and is overwritten.

    Arithmetic wraps; right shifts are made logical by masking. In place because over a vocabulary every pass counts.
    """
    x = x.bitwise_xor_((x >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(-0x40A7B892E31B1A47)
    x = x.bitwise_xor_((x >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(-0x6B2FB644ECCEEE15)
    return x.bitwise_xor_((x >> 31).bitwise_and_(0x1FFFFFFFF))


def _key(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """One well-mixed int64 per (seed, position, stream), of seed's shape."""
    x = _mix(seed + 0x632BE59BD9B4E019)
    x = _mix(x ^ _mix(position * 8 + stream + 0x1F123BB5159A55E5))
    return x


def _unit(bits: Tensor) -> Tensor:
    """int64 hash → float32 in (0, 1), with 53 bits near 0 so that the far tail of -log is not cut off."""
    value = (bits >> 11).bitwise_and_(0x1FFFFFFFFFFFFF).float().mul_(2.0**-53).add_(2.0**-55)
    return value.clamp_(max=1 - 2.0**-24)


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int, stream: int = STREAM_COUPLED) -> Tensor:
    """Standard Gumbel noise, float32 [..., vocab_size], for int64 seeds and positions of shape [...].

    A pure function of (seed, position, token id, stream). argmax(log_probs + noise) is a draw from softmax(log_probs).
    """
    key = _key(seed, position, stream)
    ids = torch.arange(vocab_size, dtype=torch.int64, device=seed.device) * -0x61C8864680B583EB
    rows = max(1, CACHED_ELEMENTS // max(1, vocab_size))
    if key.numel() <= rows or seed.device.type != "cpu" or torch.compiler.is_compiling():
        return _gumbel(key[..., None] + ids)
    # A dozen passes over every element: parts that stay in a processor's cache take half the time.
    parts = [_gumbel(part[:, None] + ids) for part in key.flatten().split(rows)]
    return torch.cat(parts).view(*key.shape, vocab_size)


def _gumbel(numbers: Tensor) -> Tensor:
    """Standard Gumbel noise from distinct int64 numbers, which are overwritten."""
    # -log1p(-u) is exponential with full relative precision where it is small, which is where the argmax is decided.
    return _unit(_mix(numbers)).neg_().log1p_().neg_().log_().neg_()


def uniform_noise(seed: Tensor, position: Tensor, stream: int = STREAM_ACCEPT) -> Tensor:
    """Uniform noise in (0, 1), float32, of the shape of `seed` and `position` (int64)."""
    return _unit(_mix(_key(seed, position, stream) + 0x3C6EF372FE94F82B))


def slot_key(anchor: Tensor, slot: Tensor | int) -> Tensor:
    """The `position` under which noise is drawn that belongs to one slot of one step, int64, shapes broadcast.

    Slot k behind the anchor at position t drafts the token at t + 1 + k, and so does slot k - 1 of a step that is
    anchored one token later. Noise keyed by the drafted position would return to a later step after it had already
    steered an earlier one: a probabilistic drafter would propose again the very token whose confidence shortened,
    or replaced, its chain before, and what is emitted would depend on that. An anchor position occurs in one step of
    a request at most, so (anchor, slot) occurs once, and every draw is fresh. Used for STREAM_DRAFT, STREAM_ACCEPT
    and STREAM_RECOVER; STREAM_COUPLED is keyed by position because its noise is meant to return.
    """
    return anchor * SLOTS_PER_ANCHOR + slot
