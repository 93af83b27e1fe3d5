"""What training tests start from: no settings of accelerate's, which last as long as the process, and no download."""

import pytest
from accelerate.state import AcceleratorState

from hspark.models import LoadedTarget
from hspark.train import command
from tests.tiny import tiny_llama
from tests.toy_tokenizer import TOY_EOS, TOY_VOCAB, toy_tokenizer


@pytest.fixture(autouse=True)
def no_earlier_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def target(monkeypatch):
    """A random target with a byte-level tokenizer, in place of a download."""

    def load(*args, **options):
        return LoadedTarget("tiny", tiny_llama(vocab_size=TOY_VOCAB), toy_tokenizer(chat=True), (TOY_EOS,), None)

    monkeypatch.setattr(command, "load_target", load)
    return load
