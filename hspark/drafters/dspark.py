"""The DSpark drafter inside the engine: context keys and values per row, and one block of drafts per step.

Columns of a row's buffers, for a row whose anchor (newest committed token, not yet seen by the target) is at p:

    0 .. Z-1            scratch for the block's own keys and values, rewritten by every `propose`
    Z .. Z+p-1          positions 0 .. p-1: valid, from the target's tapped hidden states
    Z+p .. Z+S-1        stale (rejected drafts, an earlier request): masked, overwritten before they count
    Z+S                 dump: padding, and positions past the drafter's limit

Nothing is rolled back after a rejection. Positions below the anchor have always been observed with their committed
token, and no others are read, so drafts are a function of the committed text alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from hspark.core import SOURCE_MODEL, Chain, RowState
from hspark.drafters.base import TargetInfo
from hspark.drafters.checkpoint import Checkpoint, TargetMismatchError, check_fit, open_checkpoint, target_table
from hspark.drafters.confidence import Calibration
from hspark.drafters.dspark_context import BufferContext, LayerKV, buffer_columns, buffer_masks
from hspark.drafters.dspark_model import DSparkModel
from hspark.drafters.limits import DraftLimits, checked_vocabulary, known_positions, reduce_vocabulary
from hspark.packing import PackedLinear, pack_each
from hspark.policy.curves import whole
from hspark.sampling import (
    GREEDY_TEMPERATURE,
    STREAM_COUPLED,
    STREAM_DRAFT,
    SamplingMode,
    TokenCounts,
    argmax,
    gumbel_noise,
    process_logits,
    slot_key,
    target_log_probs,
)

DRAFTING = ("greedy", "probabilistic")
NOISE = ("coupled", "independent")


class DSparkDrafter:
    """A DSpark drafter (section 2 of the paper): a block of draft tokens per step, with an acceptance for each.

    source: an opened checkpoint, or a network in memory (whose missing tables the target supplies).
    length: draft tokens per step, up to what one block yields; None for what the checkpoint asks for, usually all. The
        block itself keeps its trained size.
    vocabulary: ascending target ids that may be drafted; "auto" for what the checkpoint asks for, None for all.
    drafting: "greedy" takes the best token of each slot; "probabilistic" samples it at the request's own temperature
        and filters, and reports the law it was sampled from. Requests at temperature 0 draft greedily either way.
    noise: what probabilistic drafts are sampled with. "coupled": the noise that the target's own draw at that position
        uses (for coupled verification). "independent": noise of its own (for rejection sampling).
    calibration: None for the one that belongs to the checkpoint.

    context_limit: set by the host between steps: positions attended to (static); no anchor may lie beyond it. None:
        all of them. It changes the cost of a step, never its result.
    """

    name = "dspark"

    def __init__(
        self,
        source: Checkpoint | DSparkModel,
        *,
        length: int | None = None,
        vocabulary: Sequence[int] | str | None = "auto",
        drafting: str = "greedy",
        noise: str = "coupled",
        calibration: Calibration | None = None,
    ) -> None:
        config = source.config
        if drafting not in DRAFTING:
            raise ValueError(f"drafting={drafting!r} is not known; use one of {', '.join(DRAFTING)}")
        if noise not in NOISE:
            raise ValueError(f"noise={noise!r} is not known; use one of {', '.join(NOISE)}")
        if length is not None and (length := whole("length", length, 1)) > config.width:
            raise ValueError(
                f"length={length} is more than this drafter was trained for: its blocks of block_size="
                f"{config.block_size} yield {config.width} draft tokens; use 1 to {config.width}"
            )
        limits = source.limits if isinstance(source, Checkpoint) else DraftLimits()
        self.source, self.config = source, config
        self.width = length or limits.length or config.width
        if isinstance(vocabulary, str) and vocabulary != "auto":
            raise ValueError(f'vocabulary={vocabulary!r}; use ascending target ids, "auto", or None for all')
        ids = limits.vocabulary if isinstance(vocabulary, str) else vocabulary
        self.vocabulary = None if ids is None else checked_vocabulary(ids, config.vocab_size)
        self.taps = config.taps
        self.drafting, self.noise = drafting, noise
        if calibration is None:
            calibration = source.calibration if isinstance(source, Checkpoint) else Calibration()
        self.calibration = calibration
        self.context_limit: int | None = None

    @classmethod
    def from_pretrained(cls, path: str | PathLike[Any], **options: Any) -> DSparkDrafter:
        """The drafter in a checkpoint directory or hub repository; `options` as in the constructor.

        The checkpoint is checked here; its weights are read by `bind`, straight to the target's device and type.
        """
        return cls(open_checkpoint(path), **options)

    # ---- binding to a target -------------------------------------------------------------------------------------

    def bind(self, target: TargetInfo, max_batch_size: int, max_length: int) -> None:
        """Loads the weights and allocates the buffers of `max_batch_size` rows of up to `max_length` tokens."""
        self.model = self._load(target)
        config = self.config = self.model.config
        self.columns = known_positions(config.max_positions, max_length, "DSpark")
        self.scratch, total = buffer_columns(config, self.columns)
        shape = (max_batch_size, config.num_kv_heads, total, config.head_dim)
        self.buffers = [LayerKV.zeros(shape, target.dtype, target.device) for _ in range(config.num_layers)]
        self.temperatures, self.biases = torch.tensor(self.calibration.for_width(self.width), device=target.device)
        self.target_vocab = target.vocab_size
        ids = self.model.target_ids()
        # A target with fewer (padding) rows than the drafter: what it does not have cannot be drafted.
        highest = int(ids.max()) if config.reduced else config.drafts - 1
        self.forbidden = None if highest < self.target_vocab else ids >= self.target_vocab

    def _load(self, target: TargetInfo) -> DSparkModel:
        """The network in the target's type, on its device. One in memory that already fits is used as it is."""
        if isinstance(self.source, Checkpoint):
            model = self.source.load(target)
            if self.vocabulary is not None:
                reduce_vocabulary(model, self.vocabulary)
            return _packed(model, target)
        model = self.source
        check_fit(model.config, target, "the network in memory")
        weight = model.fc.weight
        complete = model.embed_tokens is not None and model.lm_head is not None
        if not complete or weight.dtype != target.dtype or weight.device != target.device:
            model = copy.deepcopy(model).to(device=target.device, dtype=target.dtype)
        if model.embed_tokens is None:
            model.share_tables(embed_tokens=target_table(target, "embed_tokens.weight"))
        if model.lm_head is None:
            model.share_tables(lm_head=target_table(target, "lm_head.weight"))
        if model.embed_tokens is None or model.lm_head is None:
            raise TargetMismatchError(f"the network lacks embed_tokens or lm_head, and so does target {target.name!r}")
        return model if self.vocabulary is None else reduce_vocabulary(copy.deepcopy(model), self.vocabulary)

    # ---- the device side -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, features: Tensor, row: Tensor, position: Tensor) -> None:
        """Stores each layer's keys and values of T target tokens.

        features: [T, N*H] tapped hidden states. row, position: int64 [T]; position = max_length is padding.
        """
        model = self.model
        context = model.context_features(features.to(model.fc.weight.dtype))
        column = self.scratch + position.clamp(max=self.columns)
        for buffer, new in zip(self.buffers, model.keys_values(context[None], position[None]), strict=True):
            for store, value in zip(buffer, new, strict=True):
                # A masked column has weight zero, but zero times NaN is NaN: a broken request must not leave any.
                store[row, :, column] = value[0].transpose(0, 1).nan_to_num()

    @torch.no_grad()
    def propose(self, rows: RowState, mode: SamplingMode) -> Chain:
        """One chain [R, width] per row, from what was observed before its anchor. See the head of this file."""
        anchor = rows.length - 1
        hidden = self._block(rows, anchor)
        tokens, law, scores = self._draft(hidden, rows, anchor, mode)
        # Past its positions, or broken by overflow, the drafter abstains: that costs acceptance, not correctness.
        able = hidden.isfinite().flatten(1).all(dim=1)
        if self.config.max_positions is not None:
            able = able & (anchor + self.config.block_size <= self.config.max_positions)
        point_mass = None
        if law is not None:
            point_mass = (rows.sampling.temperature <= GREEDY_TEMPERATURE)[:, None].expand(tokens.shape)
        return Chain.build(
            tokens,
            torch.where(able, self.width, 0),
            self._acceptance(scores),
            source=SOURCE_MODEL,
            point_mass=point_mass,
            log_probs=law,
        )

    def _block(self, rows: RowState, anchor: Tensor) -> Tensor:
        """Hidden states [R, B, H] of one block per row, its anchors at positions `anchor` [R]."""
        columns = self.columns if self.context_limit is None else min(self.context_limit, self.columns)
        tokens, positions = self.model.block_inputs(self._known(self._anchor_tokens(rows, anchor)), anchor)
        masks = buffer_masks(self.config, anchor, self.scratch, columns, self.buffers[0].keys.dtype)
        return self.model.block_hidden(tokens, positions, BufferContext(self.config, self.buffers, masks))

    @staticmethod
    def _anchor_tokens(rows: RowState, anchor: Tensor) -> Tensor:
        return rows.tokens.gather(1, anchor[:, None])[:, 0]

    def _known(self, tokens: Tensor) -> Tensor:
        """Target ids [..] as input of the drafter; ids past its own vocabulary read as the mask token."""
        if self.target_vocab <= self.config.vocab_size:
            return tokens
        return torch.where(tokens < self.config.vocab_size, tokens, self.config.mask_token_id)

    def _draft(
        self, hidden: Tensor, rows: RowState, anchor: Tensor, mode: SamplingMode
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Walks the block left to right: each slot's logits are corrected by the token chosen before it.

        hidden: [R, B, H]. Returns tokens int64 [R, K] (target ids), their law [R, K, V] or None, and the scores [R, K]
        that `_acceptance` reads.
        """
        model, head = self.model, self.model.markov_head
        first = 0 if self.config.anchor_first else 1
        slots = hidden[:, first : first + self.width]
        base = model.base_logits(slots)
        sampled = self.drafting == "probabilistic" and mode.sampled
        counts = committed_counts(rows, self.target_vocab) if mode.penalties else None
        prev = self._known(self._anchor_tokens(rows, anchor))
        state: Tensor | None = None
        if head is not None and first:
            _, state = head.step(head.markov_w1(prev), hidden[:, 0], None)
        tokens, laws, before, tops = [], [], [], []
        for slot in range(self.width):
            before.append(prev)
            logits = base[:, slot]
            if head is not None:
                latent, state = head.step(head.markov_w1(prev), slots[:, slot], state)
                logits = logits + head.markov_w2(latent)
            if self.forbidden is not None:
                logits = logits.masked_fill(self.forbidden, -math.inf)
            if model.confidence_head is None:
                tops.append(logits.amax(dim=-1).float() - logits.float().logsumexp(dim=-1))
            if sampled:
                law = target_log_probs(self._in_target_ids(logits), rows.sampling, mode, counts)
                token = argmax(law + self._noise(rows, anchor, slot))
                laws.append(law)
            elif mode.bias or mode.penalties:
                token = argmax(process_logits(self._in_target_ids(logits), rows.sampling, mode, counts))
            else:
                token = model.to_target(argmax(logits))
            if counts is not None:
                counts = counted(counts, token)
            tokens.append(token)
            prev = self._known(token)
        if model.confidence_head is None:
            scores = torch.stack(tops, dim=1)
        else:
            scores = model.confidence(torch.stack(before, dim=1), slots)
        return torch.stack(tokens, dim=1), torch.stack(laws, dim=1) if sampled else None, scores

    def _noise(self, rows: RowState, anchor: Tensor, slot: int) -> Tensor:
        """Gumbel noise [R, V] of one slot, whose token will stand at position anchor + 1 + slot."""
        seed = rows.sampling.seed
        if self.noise == "coupled":
            return gumbel_noise(seed, anchor + 1 + slot, self.target_vocab, STREAM_COUPLED)
        return gumbel_noise(seed, slot_key(anchor, slot), self.target_vocab, STREAM_DRAFT)

    def _in_target_ids(self, logits: Tensor) -> Tensor:
        """Draft logits [R, Vd] -> float32 [R, V] over the target's ids; -inf where the drafter has no such token."""
        full = logits.new_full((logits.shape[0], max(self.target_vocab, self.config.vocab_size)), -math.inf).float()
        if self.config.reduced:
            full = full.index_copy(1, self.model.target_ids(), logits.float())
        else:
            full[:, : logits.shape[1]] = logits
        return full[:, : self.target_vocab]

    def _acceptance(self, scores: Tensor) -> Tensor:
        """Confidence logits, or log top probabilities of a drafter without that head, [R, K] -> acceptance [R, K]."""
        if self.model.confidence_head is None:
            return self.calibration.curve(scores)
        return (scores / self.temperatures + self.biases).sigmoid()


def _packed(model: DSparkModel, target: TargetInfo) -> DSparkModel:
    """The network with its weights laid out for a CPU's kernels. The head that it shares with the target stays shared,
    also in that layout; elsewhere nothing changes."""
    head, shared = model.lm_head, target.lm_head
    if not isinstance(shared, PackedLinear):  # a compiler, or another device, takes plain layers
        return model
    if isinstance(head, nn.Linear) and _same(shared.weight, head.weight):
        model.lm_head = shared  # type: ignore[assignment]  # called like the Linear that it replaces
    pack_each(model, keep_weight=("fc", "lm_head"))
    return model


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.data_ptr() == other.data_ptr() and one.shape == other.shape


def committed_counts(rows: RowState, vocab_size: int) -> TokenCounts:
    """Occurrences of every token in each row's committed text, for penalties: bool and int64 [R, vocab_size]."""
    position = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    in_prompt = position < rows.prompt_length[:, None]
    in_output = (position < rows.length[:, None]) & ~in_prompt
    zeros = torch.zeros(rows.tokens.shape[0], vocab_size, dtype=torch.int64, device=rows.tokens.device)
    tokens = rows.tokens.clamp(max=vocab_size - 1)
    return TokenCounts(
        in_prompt=zeros.scatter_add(1, tokens, in_prompt.long()) > 0,
        in_output=zeros.scatter_add(1, tokens, in_output.long()),
    )


def counted(counts: TokenCounts, token: Tensor) -> TokenCounts:
    """The counts [R, V] after one more output token [R] per row."""
    one = torch.ones_like(token)[:, None]
    return counts._replace(in_output=counts.in_output.scatter_add(1, token[:, None], one))
