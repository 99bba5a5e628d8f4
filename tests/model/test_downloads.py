"""What is shown while weights are read."""

import pytest
from conftest import write_model
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from multirank import SIZES, resolved

from harness.base import UserError
from harness.model.weights import PretrainedWeights, decoder_layers, on_meta


def test_weights_are_read_in_silence_but_downloads_are_shown(tmp_path):
    _, config = resolved(["--sequence-length", "32", "--model", write_model(tmp_path / "model", "llama", **SIZES)])
    model = on_meta(config)
    enable_progress_bars()
    with pytest.raises(UserError, match="no weights from"):
        PretrainedWeights(model, decoder_layers(model), str(tmp_path / "model"), None)
    assert not are_progress_bars_disabled()
