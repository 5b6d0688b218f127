"""Tiny models of many architectures, and what this package computes and writes of them, held to transformers.

For the sweep (`benchmarks/architectures.py`) and for the tests that run a part of it.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALPHABET = "0123456789+-*/=()abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:?"
LIMIT = 1e-3
"""Largest difference between log-probs of one token, in nats, that is called right in float32."""
LONG, SHORT = 61, 23

SIZES: dict[str, Any] = {
    # widths
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "embed_dim": 64, "dim": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "ffn_hidden_size": 96, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "block_dim": 64, "conv_dim": 64, "expansion_ratio": 2, "lru_width": 64,
    "attention_hidden_size": 64, "embedding_size": 64,
    # depths
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2,
    "encoder_layers": 1,
    # heads
    "num_attention_heads": 2, "n_head": 2, "n_heads": 2, "num_heads": 2, "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "decoder_attention_heads": 2, "encoder_attention_heads": 2, "attention_heads": 2, "head_dim": 32,
    "kv_channels": 32, "rotary_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 64,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "n_shared_experts": 1,
    "num_shared_experts": 1, "moe_num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "moe_layer_start_index": 1,
    # recurrent states
    "state_size": 16, "mamba_d_state": 16, "mamba_d_head": 32, "mamba_n_heads": 4, "mamba_expand": 2,
    "mamba_d_ssm": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_dt_rank": 4, "time_step_rank": 4,
    "n_groups": 1, "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "mamba_chunk_size": 16,
    "chunk_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "mamba_headdim": 32, "n_mamba_heads": 2, "use_mamba_kernels": False,
    # inputs of single layers
    "hidden_size_per_layer_input": 16,
    # positions and tokens
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128, "seq_length": 128,
    "context_length": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
"""Small values of whatever of these a configuration has."""

DOUBLED = {"logits_scaling": 8.0, "logit_scale": 0.0625, "lm_head_multiplier": 0.5}
"""What is done to logits behind the head, set so that leaving it out would show."""

HYBRID = {"num_hidden_layers": 4}
CASES: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 4},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 16},
    "deepseek_v3": {"head_dim": 16},
    "diffllama": {"attention_dropout": 0.0},
    "falcon": {"num_kv_heads": 1, "alibi": False},
    "falcon_mamba": {"intermediate_size": 128},
    # vLLM knows Gemma 2 with a tied head only, as it was published.
    "gemma2": {"sliding_window": 16, "tie_word_embeddings": True},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 16},
    "gemma4_text": {"num_hidden_layers": 6, "sliding_window": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "gpt_oss": {"sliding_window": 16},
    "gptj": {"rotary_dim": 16},
    "granite": {"num_key_value_heads": 1},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba": {"intermediate_size": 128},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "mistral": {"sliding_window": 16},
    "mixtral": {"sliding_window": None},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 16},
    "phi3": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 16,
            "long_factor": [4.0] * 16,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "starcoder2": {"sliding_window": 16},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
               "hybrid_layer_ids": [2], "num_mem_blocks": 1, "adapter_rank": 8, "attention_head_dim": 64,
               "attention_hidden_size": 128},
}  # fmt: skip
"""What single architectures need beside these sizes, or are tried with."""

NAMES = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "phi",
    "phi3",
    "phimoe",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "cohere",
    "cohere2",
    "falcon",
    "falcon_h1",
    "falcon_mamba",
    "mamba",
    "mamba2",
    "jamba",
    "bamba",
    "zamba2",
    "lfm2",
    "lfm2_moe",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "bloom",
    "mpt",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "gpt_bigcode",
    "codegen",
    "starcoder2",
    "stablelm",
    "persimmon",
    "seed_oss",
    "smollm3",
    "glm",
    "glm4",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "arcee",
    "apertus",
    "hunyuan_v1_dense",
    "nemotron",
    "dbrx",
    "gpt_oss",
    "helium",
    "minimax",
    "recurrent_gemma",
    "rwkv",
    "xglm",
    "biogpt",
    "ministral",
    "ministral3",
    "vaultgemma",
    "diffllama",
]

MORE = {
    "llama, dynamic NTK": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
         "max_position_embeddings": 32},
    ),
    "llama, YaRN": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                             "original_max_position_embeddings": 64}, "max_position_embeddings": 64},
    ),
}  # fmt: skip
"""Variants by name: an architecture, and what is different."""

COLUMNS = (
    "log-probs",
    "dropout",
    "neighbours",
    "packed",
    "checkpoint",
    "reload",
    "LoRA",
    "in-process",
    "vLLM",
)


@dataclass
class Case:
    """A tiny model of an architecture and its tokenizer, both in evaluation mode and untouched."""

    name: str
    model: Any
    tokenizer: Any
    rows: list[Tensor] = field(default_factory=list)

    def fresh(self) -> Any:
        """A copy that may be changed."""
        return copy.deepcopy(self.model)


@dataclass(frozen=True)
class Cell:
    """The result of one column: ``right``, ``refused``, ``WRONG`` or ``error``, and what to say of it."""

    kind: str
    note: str = ""


def make(name: str) -> Case:
    """Makes the tiny model. Raises whatever transformers raises where the sizes don't suit it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from treetune.models.tokenizer import character_tokenizer

    architecture, more = MORE.get(name, (name, {}))
    tokenizer = character_tokenizer(ALPHABET, 128)
    config_class = CONFIG_MAPPING[architecture]
    default = config_class().to_dict()
    settings = {key: value for key, value in SIZES.items() if key in default}
    settings |= {key: value for key, value in DOUBLED.items() if key in default}
    for key, value in default.items():
        is_random = "drop" in key and isinstance(value, float)
        if is_random:
            settings[key] = 0.1
    settings |= {**CASES.get(architecture, {}), **more, "vocab_size": len(tokenizer)}
    if "vocab_size_per_layer_input" in default:
        settings["vocab_size_per_layer_input"] = len(tokenizer)
    config = config_class(**settings)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1 and "A_log" not in key:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
        for key, buffer in model.named_buffers():  # learned elsewhere, and kept as buffers
            if key.endswith("layer_scalar"):
                buffer.fill_(0.5)
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.5, 0.5, buffer.numel()))
    ids = torch.randint(4, len(tokenizer), (2, LONG), generator=generator)
    return Case(name, model.eval(), tokenizer, [ids[0], ids[1, :SHORT]])


def own_logprobs(model: Any, row_T: Tensor) -> Tensor:
    """Log-probs of a row's tokens but the first, as transformers computes them."""
    with torch.no_grad():
        logprobs_TV = model(input_ids=row_T[None], use_cache=False).logits[0].float().log_softmax(-1)
    return logprobs_TV[:-1].gather(-1, row_T[1:, None])[:, 0]


def trained_logprobs(policy: Any, rows: list[Tensor], layout: str) -> list[Tensor]:
    """The same of several rows, as the trainer computes them in this layout."""
    from treetune.models.logprobs import ModelInputs

    lengths = [len(row_T) for row_T in rows]
    labels_N = torch.cat([row_T[1:] for row_T in rows])
    if layout == "packed":
        ids_BT = torch.cat(rows)[None]
        places_BT = torch.cat([torch.arange(length) for length in lengths])[None]
        starts = [sum(lengths[:number]) for number in range(len(rows))]
    else:
        ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        places_BT = None
        starts = [number * ids_BT.shape[1] for number in range(len(rows))]
    positions_N = torch.cat([torch.arange(n - 1) + start for n, start in zip(lengths, starts, strict=True)])
    with torch.no_grad():
        logprobs_N = policy(ModelInputs(ids_BT, positions_N, labels_N, places_BT), 1.0)[0]
    return list(logprobs_N.split([length - 1 for length in lengths]))


def compared(gap: Tensor | float) -> Cell:
    largest = float(gap.abs().max()) if isinstance(gap, Tensor) else gap
    return Cell("right") if largest <= LIMIT else Cell("WRONG", f"off by {largest:.2g} nats")


def check_logprobs(case: Case) -> Cell:
    policy = policy_of(case.fresh())
    short = case.rows[1]
    return compared(trained_logprobs(policy, [short], "padded")[0] - own_logprobs(case.model, short))


def check_dropout(case: Case) -> Cell:
    policy = policy_of(case.fresh())
    first, second = (trained_logprobs(policy, [case.rows[1]], "padded")[0] for _ in range(2))
    return compared(first - second)


def check_neighbours(case: Case) -> Cell:
    return _beside(case, "padded")


def check_packed(case: Case) -> Cell:
    return _beside(case, "packed")


def _beside(case: Case, layout: str) -> Cell:
    policy = policy_of(case.fresh())
    gaps = [
        trained - own_logprobs(case.model, row_T)
        for trained, row_T in zip(trained_logprobs(policy, case.rows, layout), case.rows, strict=True)
    ]
    return compared(torch.cat(gaps))


def check_checkpoint(case: Case) -> Cell:
    with tempfile.TemporaryDirectory() as folder:
        back = load(written(case, weights_of(policy_of(case.fresh())), Path(folder, "policy")))
    return compared(own_logprobs(back, case.rows[0]) - own_logprobs(case.model, case.rows[0]))


def check_reload(case: Case) -> Cell:
    """Weights that are dealt out while they are read, as under ZeRO-3."""
    from treetune.exceptions import NotInParts
    from treetune.models.pretrained import PretrainedModel
    from treetune.models.shards import read_whole

    with tempfile.TemporaryDirectory() as folder:
        case.model.save_pretrained(Path(folder, "model"))
        case.tokenizer.save_pretrained(Path(folder, "model"))
        try:
            attention = case.model.config._attn_implementation
            source = PretrainedModel(name_or_path=str(Path(folder, "model")), attention=attention)
            back = source.load_in_parts(torch.float32)
        except NotInParts as reason:
            return Cell("right", f"read whole: {reason}")
        read_whole(back)
    return compared(own_logprobs(back.eval(), case.rows[0]) - own_logprobs(case.model, case.rows[0]))


def check_lora(case: Case) -> Cell:
    from treetune.models.lora import Lora, refusing_idle_adapters

    lora, model = Lora(rank=4), case.fresh()
    lora.apply(model, 0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".lora_B." in key:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    with refusing_idle_adapters(model):
        expected = own_logprobs(model.eval(), case.rows[0])
    if float((expected - own_logprobs(case.model, case.rows[0])).abs().max()) <= LIMIT:
        return Cell("WRONG", "adapters change nothing")
    with tempfile.TemporaryDirectory() as folder:
        back = load(written(case, lora.merged_weights(weights_of(policy_of(model))), Path(folder, "policy")))
    gap = float((own_logprobs(back, case.rows[0]) - expected).abs().max())
    rounding = rounding_of(back, case.rows[0])
    if LIMIT < gap <= 3 * rounding <= 10 * LIMIT:
        note = (
            f"off by {gap:.2g} nats, which is rounding: moving each merged weight by a unit in the last place"
            f" of float32 moves the log-probs by {rounding:.2g}"
        )
        return Cell("right", note)
    return compared(gap)


def rounding_of(model: Any, row_T: Tensor) -> float:
    """Returns by how much log-probs move when each weight moves by at most a unit in its last place."""
    before = own_logprobs(model, row_T)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + (torch.rand(parameter.shape, generator=generator) - 0.5) * 2**-22)
    return float((own_logprobs(model, row_T) - before).abs().max())


def check_in_process(case: Case) -> Cell:
    from treetune.engine.settings import InProcessSettings

    return _sampled(case, InProcessSettings())


def check_vllm(case: Case) -> Cell:
    from treetune.engine.settings import VllmSettings

    return _sampled(case, VllmSettings(replicas=1))


def _sampled(case: Case, settings: Any) -> Cell:
    """Log-probs of what an engine samples, on weights that it is given after its start."""
    from treetune.engine.base import EngineLaunch, Rendezvous
    from treetune.engine.engine import start_engine
    from treetune.engine.requests import Request, SamplingParams
    from treetune.models.policy_files import write_for_engine

    weights = weights_of(policy_of(case.fresh()))
    with tempfile.TemporaryDirectory() as folder:
        first, later = Path(folder, "0"), Path(folder, "1")
        for place, scale in ((first, 0.9), (later, 1.0)):
            scaled = {name: scale * value if value.ndim > 1 else value for name, value in weights.items()}
            write_for_engine(scaled, case.model.config, case.tokenizer, place)
        launch = EngineLaunch(
            weights=first,
            logs=Path(folder, "logs"),
            seed=0,
            context_length=LONG,
            ranks=Rendezvous(0, 1, Path(folder), lambda _: None),
            device="cpu",
            end_ids=(1,),
        )
        engine = start_engine(settings, launch)
        try:
            engine.wait_ready()
            engine.load(later, 1)
            prompts = [row_T[:8].numpy() for row_T in case.rows]
            sampling = SamplingParams(max_tokens=40, temperature=1.0)
            requests = [Request(prompt, 5 * n, 1, sampling) for n, prompt in enumerate(prompts)]
            answers = [answer[0] for answer in engine.generate(requests)]
            restarts = getattr(engine, "restarts", 0)
        finally:
            engine.close()
    gaps = []
    for prompt, answer in zip(prompts, answers, strict=True):
        row_T = torch.tensor([*prompt.tolist(), *answer.token_ids.tolist()])
        own = own_logprobs(case.model, row_T)[len(prompt) - 1 :]
        gaps.append(own - torch.tensor(answer.logprobs.tolist()))
    cell = compared(torch.cat(gaps))
    return Cell("WRONG", f"{restarts} new servers for a sync") if restarts else cell


def policy_of(model: Any) -> Any:
    """The model as it is trained: in training mode."""
    from treetune.models.logprobs import PolicyModule

    return PolicyModule(model.train())


def weights_of(policy: Any) -> dict[str, Tensor]:
    """The weights by name as the trainer gives them out."""
    from treetune.trainer.deepspeed_model import DeepSpeedModel

    class Weights(DeepSpeedModel):
        """The part of it that reads weights, without an optimiser."""

        def __init__(self, module: Any) -> None:
            self._module, self.zero_stage = module, 0

        @property
        def module(self) -> Any:
            return self._module

    weights = Weights(policy).state_dict()
    return {name.removeprefix("model."): weight for name, weight in weights.items()}


def written(case: Case, weights: dict[str, Tensor], folder: Path) -> Path:
    from treetune.models.policy_files import write_policy

    write_policy(weights, case.model.config, case.tokenizer, folder)
    return folder


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


CHECKS: dict[str, Callable[[Case], Cell]] = {
    "log-probs": check_logprobs,
    "dropout": check_dropout,
    "neighbours": check_neighbours,
    "packed": check_packed,
    "checkpoint": check_checkpoint,
    "reload": check_reload,
    "LoRA": check_lora,
    "in-process": check_in_process,
    "vLLM": check_vllm,
}


def sweep(name: str, columns: tuple[str, ...]) -> dict[str, Cell]:
    """Runs the columns for one architecture. An error that is no refusal is told as such."""
    try:
        case = make(name)
        own_logprobs(case.model, case.rows[0])
    except Exception as error:  # a sweep goes on
        return {"made": Cell("error", first_line(error))}
    cells = {}
    for column in columns:
        try:
            cells[column] = CHECKS[column](case)
        except ValueError as error:
            cells[column] = Cell("refused", first_line(error))
        except Exception as error:  # a sweep goes on
            cells[column] = Cell("error", first_line(error))
    return cells


def first_line(error: Exception) -> str:
    text = str(error).replace(tempfile.gettempdir() + "/", "").strip().splitlines()
    return f"{'' if isinstance(error, ValueError) else type(error).__name__ + ': '}{text[0] if text else ''}"
