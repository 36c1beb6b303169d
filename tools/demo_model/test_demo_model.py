"""Checks of the training code: `python3 -m pytest test_demo_model.py` (CPU, under a minute)."""

import random

import numpy as np
import torch

import corpus
import export
import gated_delta
import prompts
from model import Cache, Config, LanguageModel, generate


def random_rule_inputs(T: int, dtype=torch.float64):
    B, H, Dk, Dv = 2, 3, 8, 12
    torch.manual_seed(T)
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, Dk, dtype=dtype), dim=-1) for _ in range(2))
    v = torch.randn(B, T, H, Dv, dtype=dtype)
    beta, log_decay = torch.rand(B, T, H, dtype=dtype), -torch.rand(B, T, H, dtype=dtype) * 0.3
    state = torch.randn(B, H, Dk, Dv, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, beta, log_decay, state)]


def test_chunked_rule_equals_recurrent_rule_with_gradients():
    for T in (1, 63, 64, 65, 200):
        inputs = random_rule_inputs(T)
        grads = []
        for rule in (gated_delta.recurrent, gated_delta.chunked):
            out, state = rule(*inputs)
            loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() + state.square().sum()
            grads.append((out, state, *torch.autograd.grad(loss, inputs)))
        for a, b in zip(*grads):
            assert torch.allclose(a, b, rtol=1e-8, atol=1e-9), T


def test_inverse_of_near_parallel_keys_stays_accurate():
    A = (torch.ones(1, 64, 64) * 0.999).tril(-1)
    product = gated_delta.unit_lower_inverse(A) @ (torch.eye(64) + A)
    assert (product - torch.eye(64)).abs().max() < 1e-4


def tiny() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Config(vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=4, head_dim=32,
                                num_attention_heads=3, num_key_value_heads=1, linear_num_key_heads=2, linear_num_value_heads=4,
                                linear_key_head_dim=16, linear_value_head_dim=24)).eval()  # fmt: skip


@torch.no_grad()
def test_cached_steps_equal_the_whole_run():
    model, ids = tiny(), torch.randint(0, 96, (1, 75), generator=torch.Generator().manual_seed(1))
    whole = model(ids)
    cache = Cache.empty(4)
    parts = [model(ids[:, :70], cache)] + [model(ids[:, t : t + 1], cache) for t in range(70, 75)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-4)


@torch.no_grad()
def test_first_draft_does_not_depend_on_the_number_of_drafts():
    model, ids = tiny(), torch.randint(0, 96, (2, 43), generator=torch.Generator().manual_seed(2))
    hidden = model.trunk(ids[:, :40])
    one, three = model.draft_hidden(ids, hidden, 1), model.draft_hidden(ids, hidden, 3)
    assert torch.allclose(one[0], three[0], atol=1e-5)


@torch.no_grad()
def test_later_drafts_see_verified_positions_and_their_own_drafts_alone():
    """The second draft at position t equals one made after a prefix that ends at t, where nothing later exists."""
    model, ids = tiny(), torch.randint(0, 96, (1, 43), generator=torch.Generator().manual_seed(3))
    hidden = model.trunk(ids[:, :40])
    full = model.draft_hidden(ids, hidden, 3)
    for t in (0, 17):
        cut = model.draft_hidden(ids[:, : t + 4], hidden[:, : t + 1], 3)
        for depth in range(3):
            assert torch.allclose(cut[depth][:, t], full[depth][:, t], atol=1e-5)


def test_quantisation_keeps_every_weight_within_a_step():
    weight = torch.randn(6, 192, generator=torch.Generator().manual_seed(4)) * 0.1 + 0.3
    stored = export.quantize(weight)
    assert stored["weight"].shape == (6, 48) and stored["scales"].shape == stored["biases"].shape == (6, 3)
    restored = export.dequantize(stored["weight"], stored["scales"], stored["biases"])
    steps = (restored - weight).view(6, 3, 64) / stored["scales"].float()[..., None]
    assert steps.abs().max() < 1.6  # half a step of rounding, and what bf16 takes from scale and bias


def test_decoding_in_a_batch_equals_decoding_alone():
    model, prompts = tiny(), torch.randint(0, 96, (3, 9), generator=torch.Generator().manual_seed(5))
    together = generate(model, prompts, 20, stop={7})
    assert together == [generate(model, row[None], 20, stop={7})[0] for row in prompts]


def test_renamed_and_recast_heroes_agree_in_prompt_and_text():
    prompt = "Write a short story of about 200 words. Write three short paragraphs. It is about a brave mouse named Pia who learns to swim by the sea."
    text = "A mouse named Pia was afraid. Her friend said: Pia, mice can swim."
    rng = random.Random(6)
    for _ in range(50):
        new_prompt, new_text = prompts.recast_hero(*prompts.rename_hero(prompt, text, rng), rng)
        story = prompts.STORY.match(new_prompt)
        noun, name = story["who"].split()[-1], story["name"]
        assert name in prompts.GIRLS and noun in prompts.MORE_ANIMALS
        assert new_text.startswith(f"{'An' if noun[0] in 'aeio' else 'A'} {noun} named {name} was") and "Pia" not in new_text


def test_rows_start_with_a_document_and_score_texts_alone():
    ragged = corpus.Ragged.join
    texts = ragged([[10 * i + v for v in range(5)] for i in range(9)])  # 3 documents of 3 versions
    wordings = ragged([[90, 91]] * 27)
    template = corpus.Template.__new__(corpus.Template)
    ids = lambda *values: np.array(values, np.uint16)
    template.user, template.assistant = ids(100), ids(101)
    template.end, template.end_of_text = ids(102 | corpus.SCORED, 103), ids(104 | corpus.SCORED)
    for seed in range(20):
        for row in corpus.pack(corpus.Encoded(texts, wordings), template, 12, seed):
            assert row[0] == 100 or row[0] & 0x7FFF in range(0, 90, 10)
            plain, scored = row & 0x7FFF, row >= corpus.SCORED
            assert all(scored == ((plain < 90) | (plain == 102) | (plain == 104)))
