"""Protocol buffers as their specification spells them, there and back."""

import numpy as np
import pytest

from etude.protocols import Completion
from etude.tinker.messages import decode_batch, encode_samples
from etude.tinker.protobuf import decode, entry, field, varints
from etude.types import Finish


def test_the_examples_of_the_specification() -> None:
    assert field(1, 150) == bytes.fromhex("089601")
    assert field(2, "testing") == bytes.fromhex("120774657374696e67")
    assert decode(bytes.fromhex("089601 120774657374696e67")) == {1: [150], 2: [b"testing"]}
    assert varints(bytes.fromhex("038e029ea705")) == [3, 270, 86942]


def test_doubles_and_maps_come_back() -> None:
    (message,) = decode(entry(5, "clip", 0.25))[5]
    assert isinstance(message, bytes)
    assert decode(message) == {1: [b"clip"], 2: [0.25]}


@pytest.mark.parametrize("data", ["08", "0896", "1207746573", "0b", "09 00", "08" + "ff" * 11])
def test_damage_is_named(data: str) -> None:
    with pytest.raises(ValueError, match="protobuf"):
        decode(bytes.fromhex(data))


def request(tokens: list[int], targets: list[int]) -> bytes:
    tensor = field(1, np.array(targets, np.int64).tobytes()) + field(3, 2) + field(4, len(targets))
    chunk = field(1, field(1, np.array(tokens, np.int32).tobytes()))
    datum = field(1, chunk) + entry(2, "target_tokens", tensor)
    return field(1, "m") + field(2, 3) + field(3, datum) + field(4, "ppo") + entry(5, "clip_low_threshold", 0.5)


def test_a_batch_is_read() -> None:
    batch = decode_batch(request([1, 2, 3], [2, 3, 4]))
    assert (batch.model_id, batch.seq_id, batch.loss_fn, batch.forward_only) == ("m", 3, "ppo", False)
    assert batch.loss_config == {"clip_low_threshold": 0.5}
    (datum,) = batch.data
    assert datum.token_ids.tolist() == [1, 2, 3]
    assert datum.inputs["target_tokens"].tolist() == [2, 3, 4]


def test_a_text_among_the_options_of_a_loss_is_refused() -> None:
    tagged = entry(7, "clip_low_threshold", field(1, 0.5)) + entry(7, "mode", field(2, "mean"))
    with pytest.raises(ValueError, match=r"loss_fn_config\['mode'\] is a text"):
        decode_batch(request([1, 2, 3], [2, 3, 4]) + tagged)


def test_inputs_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target_tokens has shape \[2\]: expected one number for each of 3 tokens"):
        decode_batch(request([1, 2, 3], [2, 3]))


def test_samples_have_tokens_logprobs_and_why_they_ended() -> None:
    ids, logprobs = np.array([7, 8], np.int32), np.array([-0.5, -1.0], np.float32)
    completion = Completion(token_ids=ids, logprobs=logprobs, versions=ids * 0, finish=Finish.LENGTH)
    (sequence,) = decode(encode_samples([completion]))[1]
    assert isinstance(sequence, bytes)
    assert decode(sequence) == {1: [1], 2: [ids.tobytes()], 3: [logprobs.tobytes()]}
