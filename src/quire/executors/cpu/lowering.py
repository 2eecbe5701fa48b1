"""Lowers a ModelSpec and its tensors to a native decoder: weights packed, stages listed once; and
says beforehand what memory that takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.core.errors import UnsupportedModelError
from quire.core.progress import WEIGHTS, reported
from quire.executors.cpu.experts import (
    ExpertLowering,
    record_bytes,
    router_bytes,
    slot_bytes,
)
from quire.executors.cpu.native import native
from quire.loader.tensor import Tensor
from quire.model.features import check_lowered
from quire.model.kv_layout import KVLayout, one_group
from quire.model.spec import (
    Activation,
    Attention,
    Dense,
    Experts,
    Latent,
    Layer,
    ModelSpec,
    Norm,
    NormKind,
    NormSpan,
    takes_bytes_by_token,
)
from quire.model.states import StateKind, StateMixer

_NO_VECTOR = -1
_NO_MATRIX = -1
_NO_ROPE = -1
_OWN_CACHE = -1
# The projections that are multiplied twice: with the quantised activations, and with the quantised
# residual of that rounding. Of all projections that of values loses the most accuracy to
# rounded activations, and it is a small part of the work.
RESIDUAL_PASS = ("attn_v", "attn_kv_a_mqa")

_FLOAT_BYTES = 4
_LANES = 16  # of a vector


@dataclass(frozen=True, slots=True)
class Threads:
    count: int
    may_spin: bool  # whether waiting threads may spin


def lower(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    threads: Threads,
    *,
    unit: str = "",
    per_token_scale: bool = True,
    layout: KVLayout | None = None,
    has_feed_forwards: bool = True,
) -> "native.Decoder":
    """Pack every tensor and list the stages of a step.

    `unit` names the instruction set ("": the best there is). `per_token_scale`: activations of a
    BitNet model's ternary GEMMs have one scale a token, as it was trained; else one for each group
    of 32. `layout`: of the KV cache; None: one block table for all layers. `has_feed_forwards`:
    false where something else computes them, between the layers.
    """
    check_lowered(spec, "cpu")
    try:
        lowering = _Lowering(spec, tensors, threads, unit, per_token_scale)
        lowering.add_layer_inputs()
        layout = layout or one_group(spec)
        for layer in reported(WEIGHTS, range(spec.num_layers)):
            lowering.add_mixer(layer, layout.groups[layer], layout.slots[layer])
            if has_feed_forwards:
                lowering.add_feed_forward(layer)
        lowering.add_embedding_and_head()
    except (ValueError, OverflowError) as error:  # native code checks what it is given once more
        raise UnsupportedModelError(f"the CPU kernels cannot hold this model: {error}") from error
    return lowering.decoder


class _Lowering:
    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        threads: Threads,
        unit: str,
        per_token_scale: bool,
    ) -> None:
        self._spec = spec
        self._tensors = tensors
        self._num_threads = threads.count
        self._per_token_scale = per_token_scale
        self._vectors: dict[str, int] = {}  # parallel halves share a norm
        self._layers: dict[int, int] = {}  # of those that attend: their numbers in the decoder
        self.decoder = native.make_decoder(
            hidden_size=spec.hidden_size,
            vocabulary_size=spec.vocabulary_size,
            embedding_scale=spec.embedding_scale,
            logit_soft_cap=spec.logit_soft_cap,
            layer_input_size=0 if spec.layer_inputs is None else spec.layer_inputs.size,
            unit=unit,
            num_threads=threads.count,
            may_spin=threads.may_spin,
        )
        for rope in spec.ropes:
            self.decoder.add_rope(rope.dims, rope.interleaved)

    def add_layer_inputs(self) -> None:
        """The vectors that layers get of a token, made once for all of them."""
        inputs, stage = self._spec.layer_inputs, self.decoder.add_stage
        if inputs is None:
            return
        scale = self._spec.hidden_size**-0.5
        projection = [self._matrix("per_layer_model_proj", False, scale)]
        stage("norm_and_quantise", matrices=projection)
        stage("project", output="layer_inputs", matrices=projection)
        stage(
            "add_layer_embedding",
            norm=self._norm("per_layer_proj_norm", inputs.norm),
            matrices=self._matrices(["per_layer_token_embd"]),
        )

    def add_mixer(self, index: int, group: int, slot: int) -> None:
        layer, prefix = self._spec.layers[index], f"blk.{index}."
        if layer.mixer is None:
            return
        if layer.state_beside is not None:
            self._add_both(index, prefix, layer, layer.state_beside, group, slot)
            return
        if isinstance(layer.mixer, StateMixer):
            output = self._add_state(prefix, layer, layer.mixer)
        else:
            output = self._add_attention_layer(index, prefix, layer, group, slot)
        # Parallel halves take the same state: the first is kept apart until the second is added.
        is_apart = layer.is_parallel or layer.mixer_output_norm is not None
        self._add_product(output, layer.residual_scale, is_apart)
        if is_apart and not layer.is_parallel:
            self._add_branch(f"{prefix}post_attention_norm", layer.mixer_output_norm, layer)

    def _add_both(
        self, index: int, prefix: str, layer: Layer, state: StateMixer, group: int, slot: int
    ) -> None:
        """What the state makes is kept apart until that of attention is added: rows that nobody
        asked for are dropped where the last layer attends."""
        self._add_product(self._add_state(prefix, layer, state), 1.0, is_apart=True)
        output = self._add_attention_layer(index, prefix, layer, group, slot)
        self.decoder.add_stage("project_and_add", output="branch", matrices=[output])
        self._add_branch(f"{prefix}post_attention_norm", layer.mixer_output_norm, layer)

    def _add_attention_layer(
        self, index: int, prefix: str, layer: Layer, group: int, slot: int
    ) -> int:
        """Everything up to the output projection; its matrix."""
        part = layer.attention
        number = self._layers[index] = self._add_shape(prefix, part, group, slot)
        if part.latent is None:
            return self._add_attention(number, prefix, layer)
        return self._add_latent_attention(number, prefix, layer, part.latent)

    def add_feed_forward(self, index: int) -> None:
        """And what comes after both halves."""
        layer, prefix = self._spec.layers[index], f"blk.{index}."
        if layer.feed_forward is not None:
            self._add_feed_forward(prefix, layer)
        self._finish_layer(index, prefix, layer)

    def _add_product(self, matrix: int, scale: float, is_apart: bool) -> None:
        """Add a half's product to the hidden state, or begin the branch with it."""
        if is_apart:
            self.decoder.add_stage("project", output="branch", matrices=[matrix])
        else:
            stage = self.decoder.add_stage
            stage("project_and_add", output="hidden", matrices=[matrix], scale=scale)

    def _add_branch(self, name: str, norm: Norm | None, layer: Layer) -> None:
        self.decoder.add_stage(
            "add_branch", norm=self._norm(name, norm), scale=layer.residual_scale
        )

    def _finish_layer(self, index: int, prefix: str, layer: Layer) -> None:
        """What comes after both halves."""
        stage, inputs = self.decoder.add_stage, self._spec.layer_inputs
        if inputs is not None:
            gate, made = self._matrices([f"{prefix}inp_gate"]), self._matrices([f"{prefix}proj"])
            stage("norm_and_quantise", matrices=gate)
            stage("gate_and_up", matrices=gate, gate=inputs.activation, layer_input=index)
            stage("norm_and_quantise", input="gated", matrices=made)
            stage("project", output="branch", matrices=made)
            stage("add_branch", norm=self._norm(f"{prefix}post_norm", inputs.norm))
        if layer.has_output_scale:
            scale = self._tensors[f"{prefix}layer_output_scale.weight"].to_float32()[0]
            stage("scale_hidden", scale=float(scale))

    def _add_shape(self, prefix: str, part: Attention, group: int, slot: int) -> int:
        latent = part.latent
        # Rounded twice, in single precision: the kernels' own convention, on which bits depend.
        usual_scale = np.float32(1.0) / np.sqrt(np.float32(part.head_dim))
        return self.decoder.add_layer(
            num_heads=part.num_heads,
            num_kv_heads=part.num_kv_heads if latent is None else 1,
            head_dim=part.head_dim if latent is None else latent.kv_rank + latent.rope_dims,
            value_dim=part.value_dim if latent is None else latent.kv_rank,
            rope=_NO_ROPE if part.rope is None else self._spec.ropes.index(part.rope),
            window=part.window or 0,
            is_chunked=part.is_chunked,
            scale=float(usual_scale) if part.has_usual_scale else part.scale,
            soft_cap=part.soft_cap,
            sinks=self._vector(f"{prefix}attn_sinks.weight") if part.has_sinks else _NO_VECTOR,
            slopes=part.alibi_slopes if part.alibi else (),
            kv_layer=_OWN_CACHE if part.kv_layer is None else self._layers[part.kv_layer],
            has_key_values=part.has_key_values,
            has_values_in_keys=latent is not None,
            group=group,
            slot=slot,
        )

    def _add_attention(self, index: int, prefix: str, layer: Layer) -> int:
        stage, part = self.decoder.add_stage, layer.attention
        names = "q" if part.kv_layer is not None else "qk" if part.has_key_values else "qkv"
        qkv = self._matrices([f"{prefix}attn_{name}" for name in names])
        gate = self._matrices([f"{prefix}attn_gate"]) if part.has_output_gate else []
        before = self._norm(f"{prefix}attn_norm", layer.mixer_norm)
        stage("norm_and_quantise", norm=before, matrices=[*qkv, *gate])
        stage("project", matrices=qkv)
        if gate:
            stage("project", output="gated", matrices=gate)
        qk_norm = part.qk_norm
        norm = None if qk_norm is None else qk_norm.norm
        stage(
            "rope_and_store",
            layer=index,
            query_norm=self._norm(f"{prefix}attn_q_norm", norm),
            key_norm=self._norm(f"{prefix}attn_k_norm", norm) if "k" in names else None,
            value_norm=self._norm(f"{prefix}attn_v_norm", part.value_norm),
            norm_span=NormSpan.HEAD if qk_norm is None else qk_norm.span,
            norms_after_rope=qk_norm is not None and qk_norm.is_after_rope,
            position_scale=_position_scale(part),
        )
        stage("attend", layer=index)
        if gate:
            stage("gate_output", has_sigmoid=True)
        output = self._matrices([f"{prefix}attn_output"])
        output_norm = self._norm(f"{prefix}attn_sub_norm", part.output_norm)
        stage("norm_and_quantise", input="attention_output", norm=output_norm, matrices=output)
        return output[0]

    def _add_latent_attention(self, index: int, prefix: str, layer: Layer, latent: Latent) -> int:
        """The key's matrix of each head is applied to the query, the value's to what attention
        leaves."""
        stage, part = self.decoder.add_stage, layer.attention
        self._add_latent_queries(prefix, layer, latent)
        keys, values = self._heads(f"{prefix}attn_k_b"), self._heads(f"{prefix}attn_v_b")
        stage("norm_and_quantise", input="gated", matrices=keys, is_by_head=True)
        width = latent.kv_rank + latent.rope_dims
        stage("project", matrices=keys, is_by_head=True, output_stride=width)
        stage(
            "latent_rope_and_store",
            layer=index,
            key_norm=self._norm(f"{prefix}attn_kv_a_norm", latent.norm),
            position_scale=_position_scale(part),
        )
        stage("attend", layer=index)
        stage("norm_and_quantise", input="attention_output", matrices=values, is_by_head=True)
        width = part.value_dim
        stage("project", output="gated", matrices=values, is_by_head=True, output_stride=width)
        output = self._matrices([f"{prefix}attn_output"])
        stage("norm_and_quantise", input="gated", matrices=output)
        return output[0]

    def _add_state(self, prefix: str, layer: Layer, part: StateMixer) -> int:
        """Everything up to the output projection; its matrix."""
        stage = self.decoder.add_stage
        vector = {name: self._state_vector(f"{prefix}{name}") for name in part.vectors()}
        taps = self._tensors[f"{prefix}ssm_conv1d.weight"].to_float32().T
        state = self.decoder.add_state(
            kind=part.kind,
            kernel=part.kernel,
            num_heads=part.num_heads,
            num_groups=part.num_groups,
            key_dim=part.key_dim,
            value_dim=part.value_dim,
            is_tiled=part.is_tiled,
            taps=self.decoder.add_vector(np.ascontiguousarray(taps).ravel()),
            bias=vector.get("ssm_conv1d.bias", _NO_VECTOR),
            a=vector.get("ssm_a.weight", _NO_VECTOR),
            dt=vector.get("ssm_dt.bias", _NO_VECTOR) if part.step_rank == 0 else _NO_VECTOR,
            d=vector.get("ssm_d.weight", _NO_VECTOR),
            step_rank=part.step_rank,
        )
        others = ("ssm_gate", "ssm_x", "ssm_dt", "ssm_out")
        names = [name for name in part.matrices(1) if name not in others]
        inputs = self._matrices([f"{prefix}{name}" for name in names])
        has_heads = part.kind is not StateKind.CONVOLUTION
        gate = self._matrices([f"{prefix}ssm_gate"]) if has_heads else []
        before = self._norm(f"{prefix}attn_norm", layer.mixer_norm)
        stage("norm_and_quantise", norm=before, matrices=[*inputs, *gate])
        stage("project", matrices=inputs)
        if has_heads:
            stage("project", output="gated", matrices=gate)
        stage("convolve", state=state)
        if part.kind is StateKind.MAMBA_1:
            self._add_selection(prefix, part, state, vector)
        elif has_heads:
            stage("recur", state=state)
            is_delta_net = part.kind is StateKind.DELTA_NET
            each = part.value_dim if is_delta_net else part.output_size // part.num_groups
            weight = vector.get("ssm_norm.weight")
            stage(
                "gate_output",
                norm=None if weight is None else native.Norm(part.norm_epsilon, weight),
                norm_size=each,
                norms_before_gate=is_delta_net,
            )
        output = self._matrices([f"{prefix}ssm_out"])
        stage("norm_and_quantise", input="attention_output", matrices=output)
        return output[0]

    def _add_selection(
        self, prefix: str, part: StateMixer, state: int, vector: Mapping[str, int]
    ) -> None:
        """Time steps, keys and queries of Mamba 1 are made of the convolution's output."""
        stage = self.decoder.add_stage
        norms: dict[str, native.Norm | None] = {
            name: native.Norm(part.norm_epsilon, vector.get(f"ssm_{name}_norm.weight", _NO_VECTOR))
            if part.has_step_norms
            else None
            for name in ("dt", "b", "c")
        }
        made, steps = self._matrices([f"{prefix}ssm_x"]), self._matrices([f"{prefix}ssm_dt"])
        stage("norm_and_quantise", input="projected", matrices=made)
        stage("project", output="latent", matrices=made)
        stage("norm_and_quantise", input="latent", norm=norms["dt"], matrices=steps)
        stage("project", output="branch", matrices=steps)
        stage("recur", state=state, key_norm=norms["b"], query_norm=norms["c"])
        stage("gate_output", norm_size=part.output_size)

    def _state_vector(self, name: str) -> int:
        """-1: the taps. A row of numbers for each value is kept with a row for each key."""
        if name.endswith("ssm_conv1d.weight"):
            return _NO_VECTOR
        values = self._tensors[name]
        if len(values.shape) == 1:
            return self._vector(name)
        return self.decoder.add_vector(np.ascontiguousarray(values.to_float32().T).ravel())

    def _add_latent_queries(self, prefix: str, layer: Layer, latent: Latent) -> None:
        """The heads of queries as `gated`; what the cache keeps is at the end of `latent`."""
        stage = self.decoder.add_stage
        before = self._norm(f"{prefix}attn_norm", layer.mixer_norm)
        if latent.query_rank is None:
            queries, cached = self._matrices([f"{prefix}attn_q", f"{prefix}attn_kv_a_mqa"])
            stage("norm_and_quantise", norm=before, matrices=[queries, cached])
            stage("project", output="latent", matrices=[cached])
        else:
            both = self._matrices([f"{prefix}attn_q_a", f"{prefix}attn_kv_a_mqa"])
            stage("norm_and_quantise", norm=before, matrices=both)
            stage("project", output="latent", matrices=both)
            [queries] = self._matrices([f"{prefix}attn_q_b"])
            norm = self._norm(f"{prefix}attn_q_a_norm", latent.norm)
            stage("norm_and_quantise", input="latent", norm=norm, matrices=[queries])
        stage("project", output="gated", matrices=[queries])

    def _add_feed_forward(self, prefix: str, layer: Layer) -> None:
        part = layer.feed
        if isinstance(part, Experts):
            self._add_experts(prefix, layer, part)
            return
        # Parallel halves may share the mixer's norm.
        name, norm = "ffn_norm", layer.feed_forward_norm
        if layer.is_parallel and norm is None:
            name, norm = "attn_norm", layer.mixer_norm
        before = self._norm(f"{prefix}{name}", norm)
        down = self._add_dense(prefix, part, self._quantised_for(prefix, part, before))
        output_norm = layer.feed_forward_output_norm
        if layer.is_parallel:  # the branch holds the mixer's output
            self._add_parallel(prefix, layer, down)
            return
        self._add_product(down, layer.residual_scale, output_norm is not None)
        if output_norm is not None:
            self._add_branch(f"{prefix}post_ffw_norm", output_norm, layer)

    def _add_parallel(self, prefix: str, layer: Layer, down: int) -> None:
        if layer.feed_forward_output_norm is None and layer.mixer_output_norm is None:
            stage = self.decoder.add_stage
            stage("project_and_add", output="branch", matrices=[down])
            self._add_branch("", None, layer)
            return
        self._add_branch(f"{prefix}post_attention_norm", layer.mixer_output_norm, layer)
        self._add_product(down, layer.residual_scale, is_apart=True)
        self._add_branch(f"{prefix}post_ffw_norm", layer.feed_forward_output_norm, layer)

    def _quantised_for(self, prefix: str, part: Dense, before: "native.Norm | None") -> list[int]:
        """The matrices of gate and up, for which hidden states are normed and quantised."""
        matrices = self._gate_and_up(prefix, part)
        self.decoder.add_stage("norm_and_quantise", norm=before, matrices=matrices)
        return matrices

    def _gate_and_up(self, prefix: str, part: Dense, suffix: str = "") -> list[int]:
        names = ["ffn_gate", "ffn_up"] if part.is_gated else ["ffn_up"]
        return self._matrices([f"{prefix}{name}{suffix}" for name in names])

    def _add_dense(self, prefix: str, part: Dense, gate_and_up: list[int], suffix: str = "") -> int:
        """Gate and up; the gate quantises what it writes where no norm comes between. The matrix
        of the down projection, which is to come."""
        stage = self.decoder.add_stage
        down = self._matrices([f"{prefix}ffn_down{suffix}"])
        written_as = self._gated_format(part, down[0])
        is_xielu = part.activation is Activation.XIELU
        stage(
            "gate_and_up",
            matrices=gate_and_up,
            gate=part.activation,
            gate_numbers=self._vector(f"{prefix}ffn_xielu.weight") if is_xielu else _NO_VECTOR,
            quantised=written_as,
        )
        if written_as == "floats":
            inner = self._norm(f"{prefix}ffn_sub_norm", part.inner_norm)
            stage("norm_and_quantise", input="gated", norm=inner, matrices=down)
        return down[0]

    def _add_experts(self, prefix: str, layer: Layer, part: Experts) -> None:
        """The sum over experts is the branch, to which other feed-forwards of the layer are added;
        where nothing else is done with it, it is added to the hidden state at once."""
        if layer.is_parallel:
            raise UnsupportedModelError("experts side by side with attention do not run on the CPU")
        stage, output_norm = self.decoder.add_stage, layer.feed_forward_output_norm
        lowered = ExpertLowering(self.decoder, self._tensors, prefix)
        index = lowered.add(part)
        is_plain = output_norm is None and layer.residual_scale == 1.0
        is_alone = part.shared is None and part.beside is None and part.latent_size is None
        is_plain = is_plain and is_alone
        shared = [] if part.shared is None else self._gate_and_up(prefix, part.shared, "_shexp")
        before = self._norm(f"{prefix}ffn_norm", layer.feed_forward_norm)
        if part.latent_size is not None:
            self._add_latent_experts(prefix, lowered, index, before, shared)
        else:
            self._route(prefix, part, lowered, index, before, shared)
            self._add_sum(index, "hidden" if is_plain else "branch")
        if part.shared is not None:
            down = self._add_dense(prefix, part.shared, shared, "_shexp")
            stage("project_and_add", output="branch", matrices=[down], experts=index)
        if part.beside is not None:
            self._add_beside(prefix, part, part.beside, before)
        if not is_plain:
            self._add_branch(f"{prefix}post_ffw_norm", output_norm, layer)

    def _route(
        self,
        prefix: str,
        part: Experts,
        lowered: ExpertLowering,
        index: int,
        before: "native.Norm | None",
        shared: list[int],
    ) -> None:
        """The router, and activations for the experts."""
        stage = self.decoder.add_stage
        if part.beside is None:
            matrices = [lowered.router, *lowered.first, *shared]
            stage("norm_and_quantise", norm=before, matrices=matrices)
            stage("route", experts=index)
            return
        stage("norm_and_quantise", norm=lowered.router_norm(part), matrices=[lowered.router])
        stage("route", experts=index)
        own = self._norm(f"{prefix}pre_ffw_norm_2", part.beside_norm)
        stage("norm_and_quantise", norm=own, matrices=[*lowered.first, *shared])

    def _add_sum(self, index: int, output: str) -> None:
        self.decoder.add_stage("expert_gate_and_up", experts=index)
        self.decoder.add_stage("expert_down", experts=index, output=output)

    def _add_latent_experts(
        self,
        prefix: str,
        lowered: ExpertLowering,
        index: int,
        before: "native.Norm | None",
        shared: list[int],
    ) -> None:
        """Experts of a projection; and activations for the shared one, which takes what the router
        does."""
        stage = self.decoder.add_stage
        down, up = self._matrices([f"{prefix}ffn_latent_{name}" for name in ("down", "up")])
        stage("norm_and_quantise", norm=before, matrices=[lowered.router, down])
        stage("route", experts=index)
        stage("project", matrices=[down])
        stage("norm_and_quantise", input="projected", matrices=lowered.first)
        self._add_sum(index, "branch")
        stage("norm_and_quantise", input="branch", matrices=[up])
        stage("project", output="branch", matrices=[up])
        if shared:
            stage("norm_and_quantise", norm=before, matrices=shared)

    def _add_beside(
        self, prefix: str, part: Experts, dense: Dense, before: "native.Norm | None"
    ) -> None:
        """The dense feed-forward beside experts: both outputs are normed before they are added."""
        stage = self.decoder.add_stage
        stage("norm_branch", norm=self._norm(f"{prefix}post_ffw_norm_2", part.beside_norm))
        down = self._add_dense(prefix, dense, self._quantised_for(prefix, dense, before))
        stage("project", matrices=[down])
        own = self._norm(f"{prefix}post_ffw_norm_1", part.beside_norm)
        stage("add_to_branch", input="projected", norm=own)

    def _gated_format(self, part: Dense, down: int) -> str:
        """The format that a gate writes for the GEMM with `down`. With blocks a task is 256
        outputs, and each thread needs some of them."""
        activations = self.decoder.activation_format(down)
        too_few = part.size < 4 * native.activation_block_size * self._num_threads
        if (
            part.inner_norm is not None
            or activations == "per_token"
            or (activations == "blocks" and too_few)
        ):
            return "floats"
        return activations

    def add_embedding_and_head(self) -> None:
        tied = self._spec.tied_head
        # A scale is of products alone: rows that are looked up are without it.
        scale = self._spec.logit_scale
        embedding = self._matrix("token_embd", False, scale if tied else 1.0)
        positions = _NO_MATRIX
        if self._spec.num_positions:
            positions = self._matrix("position_embd", False)
        output_norm = self._norm("output_norm", self._spec.output_norm)
        assert output_norm is not None
        self.decoder.set_embedding_and_head(
            embedding=embedding,
            output_norm=output_norm,
            head=embedding if tied else self._matrix("output", False, scale),
            positions=positions,
            embedding_norm=self._norm("token_embd_norm", self._spec.embedding_norm),
        )

    def _matrices(self, names: list[str]) -> list[int]:
        """The matrices of one stage. One scale a token only where all of them are ternary."""
        formats = [self._tensors[f"{name}.weight"].format for name in names]
        per_token = self._per_token_scale and all(
            takes_bytes_by_token(self._spec, known) for known in formats
        )
        return [self._matrix(name, per_token) for name in names]

    def _heads(self, name: str) -> list[int]:
        """The matrices of each head, which a file has as one tensor."""
        tensor = self._tensors[f"{name}.weight"]
        num_heads, out_size, in_size = tensor.shape
        return [
            self.decoder.add_matrix(
                tensor.format.name, tensor.row_blocks(head, head + 1), out_size, in_size
            )
            for head in range(num_heads)
        ]

    def _matrix(self, name: str, per_token_scale: bool, scale: float = 1.0) -> int:
        """Read and pack a matrix; the bytes of the file are not needed after that."""
        tensor = self._tensors[f"{name}.weight"]
        out_size, in_size = tensor.shape
        return self.decoder.add_matrix(
            tensor.format.name,
            tensor.blocks,
            out_size,
            in_size,
            per_token_scale=per_token_scale,
            residual_pass=name.endswith(RESIDUAL_PASS),
            scale=tensor.scale * self._scale(name) * scale,
            bias=self._bias(name),
        )

    def _scale(self, name: str) -> float:
        tensor = self._tensors.get(f"{name}.scale")
        return 1.0 if tensor is None else float(tensor.to_float32()[0])

    def _bias(self, name: str) -> int:
        full = f"{name}.bias"
        return self._vector(full) if full in self._tensors else _NO_VECTOR

    def _norm(self, name: str, norm: Norm | None) -> "native.Norm | None":
        if norm is None:
            return None
        weight, bias = (
            self._vector(full) if full in self._tensors else _NO_VECTOR
            for full in (f"{name}.weight", f"{name}.bias")
        )
        is_layer_norm = norm.kind is NormKind.LAYER
        return native.Norm(norm.epsilon, weight, bias, is_layer_norm)

    def _vector(self, name: str) -> int:
        if name not in self._vectors:
            values = self._tensors[name].to_float32().ravel()
            self._vectors[name] = self.decoder.add_vector(values)
        return self._vectors[name]


def _position_scale(part: Attention) -> tuple[float, int, int]:
    """Factor, length, offset; a length of 0: none."""
    scale = part.position_scale
    return (0.0, 0, 0) if scale is None else (scale.factor, scale.length, scale.offset)


# ---- memory, known before a weight is packed


def weight_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The weights as the kernels keep them, to the byte."""
    return sum(_packed_bytes(name, tensor, tensors) for name, tensor in tensors.items())


def state_bytes(spec: ModelSpec) -> int:
    """A sequence's state as the kernels keep it, to the byte: values in whole vectors."""
    return _FLOAT_BYTES * sum(
        _in_vectors(part.num_convolved)
        + part.num_heads * part.key_dim * _in_vectors(part.value_dim)
        for part in spec.states.values()
    )


def _in_vectors(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _packed_bytes(name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> int:
    router = router_bytes(name, tensor, tensors)
    if router is not None:
        return router
    if _is_matrix(name, tensor):
        *stacked, out_size, in_size = tensor.shape
        num_bytes: int = native.packed_bytes(tensor.format.name, out_size, in_size)
        return math.prod(stacked) * num_bytes
    is_of_stage = name.endswith((".scale", "layer_output_scale.weight"))
    return 0 if is_of_stage and tensor.shape == (1,) else _FLOAT_BYTES * tensor.num_weights


def _is_matrix(name: str, tensor: Tensor) -> bool:
    """Norms may have weights of their own for each head, biases those of each expert."""
    return len(tensor.shape) > 1 and not name.endswith(
        ("_norm.weight", ".bias", "ssm_conv1d.weight", "ssm_a.weight")
    )


def workspace_bytes(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    num_rows: int,
    num_positions: int,
    num_threads: int = 1,
) -> int:
    """About what steps of so many rows, one of which samples, work in; rope tables included."""
    mixers = {*spec.attentions.values()}
    states = {*spec.states.values()}
    routed = [part for part in spec.feed_forwards if isinstance(part, Experts)]
    parts = [*map(_row_sizes, mixers), *map(_row_sizes, states)]
    parts += [(part.latent_size or 0, 0, 0) for part in routed]
    projected, attended, latent = (max(sizes[i] for sizes in parts) for i in range(3))
    widest = max(spec.hidden_size, spec.ffn_size, attended, latent)
    branch = spec.hidden_size if _has_branch(spec) else 0
    selective = [part for part in states if part.kind is StateKind.MAMBA_1]
    branch = max([branch, *(part.output_size for part in selective)])
    inputs = 0 if spec.layer_inputs is None else spec.num_layers * spec.layer_inputs.size
    gated = max(spec.ffn_size, latent)
    bytes_per_row = _FLOAT_BYTES * (
        spec.hidden_size + projected + attended + gated + latent + branch + inputs
    )
    for activations, _ in _activation_formats(tensors):
        bytes_per_row += 2 * record_bytes(activations, widest)
    bytes_per_row += slot_bytes(spec, tensors)
    tables = num_positions * sum(rope.dims for rope in spec.ropes)
    without = native.thread_scratch_floats(0, 0)
    scratch = num_threads * max([without, *map(_attention_floats, mixers)])
    floats: int = tables + spec.vocabulary_size + scratch
    return num_rows * bytes_per_row + _FLOAT_BYTES * floats


def _has_branch(spec: ModelSpec) -> bool:
    """Whether some half is kept apart before it is added."""
    after = ((x.mixer_output_norm, x.feed_forward_output_norm) for x in spec.layers)
    is_normed = any(norm is not None for norms in after for norm in norms)
    is_parallel = any(layer.is_parallel for layer in spec.layers)
    is_routed = any(isinstance(part, Experts) for part in spec.feed_forwards)
    is_beside = any(layer.state_beside is not None for layer in spec.layers)
    is_apart = is_normed or is_parallel or is_beside
    return is_apart or is_routed or spec.layer_inputs is not None


def _row_sizes(part: Attention | StateMixer) -> tuple[int, int, int]:
    """Of a row: queries, keys and values; what attention leaves; what latent attention or a gate on
    what is left takes."""
    if isinstance(part, StateMixer):
        others = ("ssm_x", "ssm_dt", "ssm_out")
        inputs = sum(rows for name, (rows, _) in part.matrices(1).items() if name not in others)
        return inputs, part.output_size, part.output_size
    latent = part.latent
    if latent is None:
        values = part.num_kv_heads * part.value_dim
        out_size = part.num_heads * part.value_dim
        gate = out_size if part.has_output_gate else 0
        return part.query_size + part.kv_size + values, out_size, gate
    cached = latent.kv_rank + latent.rope_dims
    made_of = max(part.query_size, cached + (latent.query_rank or 0))
    return part.num_heads * cached, part.num_heads * latent.kv_rank, made_of


def _attention_floats(part: Attention) -> int:
    latent = part.latent
    if latent is None:
        return native.thread_scratch_floats(part.head_dim, part.value_dim)
    return native.thread_scratch_floats(latent.kv_rank + latent.rope_dims, latent.kv_rank, True)


def _activation_formats(tensors: Mapping[str, Tensor]) -> set[tuple[str, bool]]:
    """The formats that activations are kept in; True: also for a residual pass."""
    found = set()
    for name, tensor in tensors.items():
        if _is_matrix(name, tensor):
            activations = native.activation_format(tensor.format.name)
            found.add((activations, False))
            makes_values = name.removesuffix(".weight").endswith(RESIDUAL_PASS)
            if makes_values and activations != "floats":
                found.add((activations, True))
    return found
