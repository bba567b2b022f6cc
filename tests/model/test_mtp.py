"""The MTP layer against transformers' `MtpModel`, and what a second draft step recycles."""

from __future__ import annotations

import inspect

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import SEED, make_oracle
from tests.helpers import Session, load_alone

LENGTH = 120


def mtp_oracle(main):
    from transformers.modeling_layers import MtpModel

    mtp = MtpModel(main, 1).float().eval()
    with torch.no_grad():
        for name, tensor in [*mtp.layers.named_parameters(), *mtp.layers.named_buffers()]:
            if "norm" in name:
                tensor.uniform_(0.7, 1.3)
            elif "bias" in name:
                tensor.uniform_(-0.9, -0.3)
            elif tensor.dim() >= 2:
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
    return mtp


def add_mtp(folder, mtp, layer: int) -> None:
    """Append the MTP layer to a checkpoint under the hub's names."""
    rename = {"mtp_block.": "", "post_norm": "shared_head.norm"}
    tensors = {}
    for name, tensor in mtp.layers[0].state_dict().items():
        for old, new in rename.items():
            name = name.removeprefix(old) if not new else name.replace(old, new)
        if name == "mlp.experts.gate_up_proj":
            for expert, merged in enumerate(tensor):
                for part, weight in zip(("gate_proj", "up_proj"), merged.chunk(2), strict=True):
                    tensors[f"mlp.experts.{expert}.{part}.weight"] = weight
        elif name == "mlp.experts.down_proj":
            tensors |= {f"mlp.experts.{expert}.down_proj.weight": w for expert, w in enumerate(tensor)}
        else:
            tensors[name] = tensor
    whole = load_file(folder / "model.safetensors")
    whole |= {f"model.layers.{layer}.{name}": tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp")
    main = make_oracle(SEED + 2)
    main.save_pretrained(folder)
    mtp = mtp_oracle(main)
    add_mtp(folder, mtp, layer=4)
    return main, mtp, load_alone(folder)


def oracle_u(mtp, hidden, tokens_after, positions):
    """The MTP layer itself: the drafting loop around it differs between releases of transformers."""
    length, layer = len(tokens_after), mtp.layers[0]
    embedding = mtp.embed_tokens(torch.tensor([tokens_after]))
    cache = "cache" if "cache" in inspect.signature(layer.forward).parameters else "past_key_values"
    with torch.no_grad():
        return layer(
            embedding,
            hidden[None],
            position_embeddings=mtp.rotary_emb(embedding, position_ids=positions[None]),
            attention_mask=torch.full((1, 1, length, length), float("-inf")).triu(1),
            position_ids=positions[None],
            **{cache: None},
        )[0]


@pytest.mark.parametrize("absorbed", [False, True])
def test_u_and_logits_equal_the_oracles(pair, absorbed):
    main, mtp, model = pair
    tokens = torch.randint(320, (LENGTH + 1,)).tolist()
    session = Session(model)
    hidden = session.feed(tokens[:LENGTH], absorbed=False)
    with torch.no_grad():
        their_hidden = main.model(torch.tensor([tokens[:LENGTH]])).last_hidden_state[0]
    torch.testing.assert_close(hidden, their_hidden, rtol=0, atol=2e-5)

    u = session.draft(their_hidden, tokens[1:], absorbed=absorbed)
    expected = oracle_u(mtp, their_hidden, tokens[1:], torch.arange(1, LENGTH + 1))
    assert expected.std() > 0.5
    torch.testing.assert_close(u, expected, rtol=0, atol=1e-5 * max(1.0, expected.std().item()))
    torch.testing.assert_close(model.logits(u), main.lm_head(expected), rtol=0, atol=2e-5)


def test_drafts_in_pieces_equal_drafts_at_once(pair):
    _, _, model = pair
    tokens = torch.randint(320, (LENGTH + 1,)).tolist()
    at_once, in_pieces = Session(model), Session(model)
    hidden = at_once.feed(tokens[:LENGTH], absorbed=False)
    whole = at_once.draft(hidden, tokens[1:], absorbed=False)
    parts = [in_pieces.draft(hidden[:77], tokens[1:78], absorbed=False)]
    parts += [in_pieces.draft(hidden[i : i + 1], [tokens[i + 1]], absorbed=True) for i in range(77, LENGTH)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=2e-5)


def test_the_hidden_state_for_the_next_step_is_the_output_of_the_shared_heads_norm(pair):
    """Recycling the state before the norm would still give text, but fewer and fewer accepted drafts."""
    _, _, model = pair
    tokens = torch.randint(320, (20,)).tolist()
    session = Session(model)
    u = session.draft(session.feed(tokens[:19], absorbed=False), tokens[1:], absorbed=False)
    normed = u / model.mtp.head_norm_w
    torch.testing.assert_close(normed.square().mean(-1), torch.ones(19), rtol=1e-3, atol=0)


def test_a_checkpoint_without_mtp_layer_is_whole(tiny_checkpoint):
    model = load_alone(tiny_checkpoint)
    assert model.mtp is None and model.config.num_nextn_predict_layers == 0
