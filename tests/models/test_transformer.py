"""The language model: sizes, causality, determinism, generation."""

from __future__ import annotations

import pytest
import torch

from tiered.models.transformer import SHAPES, Shape, Transformer, rotary_table, rotate

SMALL = Shape(layers=2, width=24, heads=3, vocabulary=37)


def build(**options: bool) -> Transformer:
    """A model as if trained: at first the head and the ends of the blocks are zero, and hide everything."""
    torch.manual_seed(0)
    model = Transformer(SMALL, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_parameter_count_is_the_sum(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(SHAPES[name])
    assert SHAPES[name].parameter_count == sum(parameter.numel() for parameter in model.parameters())


def test_presets_have_the_size_of_their_name() -> None:
    assert 1e8 < SHAPES["demo"].parameter_count < 1.3e8
    assert 0.95e9 < SHAPES["1b"].parameter_count < 1.05e9
    assert 2.9e9 < SHAPES["3b"].parameter_count < 3.1e9


@pytest.mark.parametrize("sizes", [(0, 24, 3), (2, 25, 3), (2, 24, 0), (2, 9, 3)])
def test_impossible_shapes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        Shape(*sizes)


def test_logits_and_first_loss() -> None:
    tokens = torch.randint(37, (2, 11))
    assert build()(tokens).shape == (2, 11, 37)
    assert Transformer(SMALL)(tokens, tokens).item() == pytest.approx(torch.tensor(37.0).log().item(), abs=1e-5)


def test_a_deep_model_learns_from_its_first_steps() -> None:
    """Adam's first steps move every weight alike; with blocks that are not the identity a deep model leaps up."""
    torch.manual_seed(0)
    model = Transformer(Shape(layers=24, width=64, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    tokens = torch.randint(97, 123, (2, 32))
    losses = []
    for _ in range(4):
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_same_seed_same_weights() -> None:
    one, two = build().state_dict(), build().state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_later_tokens_change_nothing_before_them() -> None:
    model, tokens = build(), torch.randint(37, (1, 9))
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 37
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_checkpointing_gives_the_same_gradients() -> None:
    tokens = torch.randint(37, (2, 7))
    gradients = []
    for checkpointing in (False, True):
        model = build(activation_checkpointing=checkpointing)
        model(tokens, tokens).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None and recomputed is not None
        assert torch.equal(plain, recomputed)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    table = rotary_table(12, 8, torch.device("cpu"))
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = rotate(q.expand(12, 8), table), rotate(k.expand(12, 8), table)
    assert torch.allclose(turned_q.norm(dim=-1), q.norm().expand(12), atol=1e-5)
    scores = turned_q @ turned_k.T
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)


def test_generate() -> None:
    model, prompt = build(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    first = model.generate(prompt, 5, seed=1)
    assert first.shape == (2, 8)
    assert torch.equal(first[:, :3], prompt)
    assert torch.equal(first, model.generate(prompt, 5, seed=1))
    assert not torch.equal(model.generate(prompt, 20, seed=1), model.generate(prompt, 20, seed=2))
    greedy = model.generate(prompt, 1, temperature=0)
    assert torch.equal(greedy[:, -1], model(prompt)[:, -1].argmax(dim=-1))


def test_bfloat16() -> None:
    model = Transformer(SMALL, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    tokens = torch.randint(37, (1, 5))
    loss = model(tokens, tokens)
    assert loss.dtype == torch.float32
    loss.backward()


def test_it_learns() -> None:
    model, tokens = build(), torch.randint(37, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
