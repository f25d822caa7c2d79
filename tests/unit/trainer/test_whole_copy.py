"""A whole copy of a model: changes are found by their bits, and only they are sent (several ranks: tests/numerics)."""

import torch

from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.trainer.checkpoint import Box
from etude.trainer.whole_copy import WHOLE, ChangedPart, WholeCopy
from trainer_ranks import make_model


def test_changes_are_found_by_their_bits() -> None:
    old = torch.arange(60, dtype=torch.bfloat16).view(6, 10)
    new = old.clone()
    new[0, 0], new[3, 4] = -0.0, float("nan")
    box = Box((2, 0), (6, 10))
    part = ChangedPart.between(box, old, new)
    assert (part.count, len(part.payload)) == (2, 2 * (8 + 2))
    whole = torch.cat((torch.zeros(2, 10), old, torch.ones(1, 10))).to(torch.bfloat16)
    part.write(whole)
    assert torch.equal(whole[2:8].view(torch.int16), new.view(torch.int16))
    assert whole[0].eq(0).all() and whole[8].eq(1).all()
    assert ChangedPart.between(box, new, new).count == len(ChangedPart.between(box, new, new).payload) == 0
    assert ChangedPart.between(box, new, old + 100).count == WHOLE


def test_a_copy_follows_and_is_rounded_as_it_is_asked_to_be() -> None:
    model = make_model(TINY)
    copy = WholeCopy(model, None, {"embedding": torch.bfloat16})
    first = copy.update()
    assert isinstance(first, Decoder)
    with torch.no_grad():
        model.embedding[1] += 1
        model.gain[0] = 7
    assert copy.update() is first
    assert torch.equal(first.embedding, model.embedding.bfloat16())
    assert torch.equal(first.gain, model.gain)
    assert first.embedding.dtype is torch.bfloat16
