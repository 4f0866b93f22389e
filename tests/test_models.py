"""Hugging Face models train as without us: tied heads, fused experts, checkpointing, generation, built both ways."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.support import Job, Result, assert_close, assert_same_bits, run_plain, run_tiered, shard_job, steps_of
from tests.support import snapshot as take_snapshot

transformers = pytest.importorskip("transformers")

VOCABULARY = 37
ON_NVME = {"parameters": "nvme", "gradients": "nvme", "optimizer_states": "nvme", "host_memory": "2MiB"}


def build(name: str, *, reentrant: bool | None = None) -> nn.Module:
    model = MODELS[name]()
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return model


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def batch_of(generator: torch.Generator, size: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (size, 9), generator=generator)


def gpt2() -> nn.Module:
    """Tied head; width 36, biases in the attention."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=36,
            n_layer=7,
            n_head=3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=36,
            intermediate_size=71,
            num_hidden_layers=7,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=32,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,  # torch's grouped matrix product wants strides of 16 bytes
            intermediate_size=72,
            num_hidden_layers=4,
            num_attention_heads=3,
            num_key_value_heads=1,
            num_local_experts=3,
            num_experts_per_tok=2,
            max_position_embeddings=32,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


MODELS = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral}


@functools.cache
def reference(name: str) -> Result:
    return run_plain(job_of(name))


def job_of(name: str, **options: Any) -> Job:
    """The HF model itself is what is sharded, so that `generate` is called on it."""
    return Job(
        factory=functools.partial(build, name, **options),
        loss=loss_of,
        batch=batch_of,
        steps=5,
        clip=0.5,
        batch_size=2,
    )


@pytest.mark.parametrize("convert", [False, True], ids=["factory", "module"])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["kept", "reentrant", "recomputed"])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_torch(tmp_path: Path, name: str, reentrant: bool | None, convert: bool) -> None:
    result = run_tiered(job_of(name, reentrant=reentrant), convert=convert, nvme=[tmp_path], **ON_NVME)
    assert_close(result, reference(name))
    assert result.report is not None
    assert result.report.nvme_read_bytes > 0


@pytest.mark.parametrize("name", MODELS)
def test_bf16_on_nvme_equals_host(tmp_path: Path, name: str) -> None:
    job = replace(job_of(name, reentrant=False), steps=3, backwards=2)
    nvme = run_tiered(job, nvme=[tmp_path], compute_dtype="bfloat16", **ON_NVME)
    assert_same_bits(nvme, run_tiered(job, compute_dtype="bfloat16"))


@pytest.mark.parametrize("name", MODELS)
def test_construction_equals_torch(tmp_path: Path, name: str) -> None:
    job = replace(job_of(name), steps=0)
    result = run_tiered(job, nvme=[tmp_path], **ON_NVME)
    assert_same_bits(Result(weights=result.weights), Result(weights=run_plain(job).weights))


def generate(model: Any) -> Tensor:
    """Greedy, with a cache."""
    model.eval()
    with torch.no_grad():
        tokens: Tensor = model.generate(
            torch.tensor([[1, 2, 3]]), max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0
        )
    model.train()
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_generation_between_steps(tmp_path: Path, name: str) -> None:
    """Case 11: training goes on as if nothing had been generated, and what is generated is torch's."""
    job = replace(job_of(name, reentrant=False), steps=2)

    def cycle(model: Any, optimizer: torch.optim.Optimizer, result: Result) -> list[Tensor]:
        texts = []
        for round_number in range(3):
            steps_of(model, optimizer, job, result, first=2 * round_number)
            texts.append(generate(model))
        take_snapshot(model, optimizer, result)
        return texts

    plain, mine = Result(), Result()
    torch.manual_seed(0)
    model = job.factory()
    expected = cycle(model, torch.optim.AdamW(model.parameters(), lr=job.lr, eps=job.eps), plain)
    with shard_job(job, nvme=[tmp_path], **ON_NVME) as (sharded, optimizer):
        assert isinstance(optimizer, tiered.AdamW)
        texts = cycle(sharded, optimizer, mine)
    assert_close(mine, plain)
    for text, expected_text in zip(texts, expected, strict=True):
        assert torch.equal(text, expected_text)
