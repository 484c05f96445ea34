"""The main example's model and data, which don't depend on the library: right values, on small cases."""

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "torch"


def load_example(name: str) -> ModuleType:
    """Import `examples/torch/<name>.py`, which is not installed, under a name that can't hide another module."""
    qualified = f"hsdp_fn_example_{name}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module  # dataclasses look their module up while it is being executed
        spec.loader.exec_module(module)
    return sys.modules[qualified]


gpt = load_example("gpt")
text = load_example("text")

TINY = gpt.GPTConfig(dim=32, layers=2, heads=2, seq_len=16)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_model(config=TINY, seed: int = 0):
    model = gpt.GPT(config)
    model.init_weights(seeded(seed))
    return model


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=seeded(seed))


def as_bytes(values) -> np.ndarray:
    return np.asarray(values, dtype=np.uint8)


# --- GPTConfig ---


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [(name, 0, ValueError) for name in ("dim", "layers", "heads", "seq_len", "vocab", "ffn_multiple")]
    + [("dim", 32.0, TypeError), ("layers", True, TypeError), ("ffn_multiple", "4", TypeError)]
    + [("tie_embeddings", 1, TypeError), ("ffn_multiple", math.inf, ValueError)]
    + [("heads", 5, ValueError), ("heads", 32, ValueError)],  # doesn't divide dim; heads one wide, which can't turn
)
def test_a_bad_config_is_refused_with_the_field_and_the_value(field, value, error):
    with pytest.raises(error) as caught:
        dataclasses.replace(TINY, **{field: value})
    assert field in str(caught.value)
    assert (repr(value) if error is TypeError else str(value)) in str(caught.value)


# --- GPT ---


def test_the_parameters_are_those_that_the_config_says():
    untied = {name: tuple(p.shape) for name, p in gpt.GPT(TINY).named_parameters()}
    assert untied["embed.weight"] == untied["head.weight"] == (256, 32)
    assert untied["norm.weight"] == (32,)
    block = {name.removeprefix("layers.1."): shape for name, shape in untied.items() if name.startswith("layers.1.")}
    assert block.pop("attention_norm.weight") == block.pop("ffn_norm.weight") == (32,)
    assert block.pop("attention.qkv.weight") == (96, 32) and block.pop("attention.out.weight") == (32, 32)
    assert block.pop("ffn.gate_up.weight") == (192, 32) and block.pop("ffn.down.weight") == (32, 96)
    assert not block
    assert len(untied) == 3 + 2 * 6
    assert gpt.GPTConfig(dim=192, ffn_multiple=8 / 3).ffn_dim == 512
    tied = gpt.GPT(dataclasses.replace(TINY, tie_embeddings=True))
    assert tied.head.weight is tied.embed.weight
    assert {name for name, _ in tied.named_parameters()} == set(untied) - {"head.weight"}


def test_a_future_byte_changes_no_earlier_logit():
    model = make_model()
    tokens = random_tokens(2, 16)
    before = model(tokens)
    for position in (1, 7, 15):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 256
        after = model(changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=0)
        assert not torch.equal(after[:, position], before[:, position])


def test_rotary_turns_each_pair_by_position_times_frequency():
    rotary = gpt.Rotary(seq_len=8, head_dim=4)
    x = torch.randn(8, 4, generator=seeded(0))
    pairs = torch.complex(x[:, :2], x[:, 2:])
    angles = torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.01])  # 10000 ** (-0 / 4), 10000 ** (-2 / 4)
    expected = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotary(x), torch.cat((expected.real, expected.imag), dim=-1))


def test_rotary_scores_depend_on_the_distance_alone():
    rotary = gpt.Rotary(seq_len=32, head_dim=8)
    q, k = torch.randn(2, 1, 8, generator=seeded(1))
    scores = rotary(q.expand(32, 8)) @ rotary(k.expand(32, 8)).T
    for distance in (-20, -1, 0, 3, 31):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert (scores[0, 0] - scores[0, 3]).abs() > 1e-2


def test_attention_is_the_causal_softmax_of_turned_queries_and_keys():
    attention = make_model(seed=2).layers[0].attention
    x = 10 * torch.randn(1, 5, 32, generator=seeded(0))
    q, k, v = (part.view(5, 2, 16).transpose(0, 1) for part in attention.qkv(x)[0].chunk(3, dim=-1))
    scores = attention.rotary(q) @ attention.rotary(k).transpose(1, 2) / 4
    weights = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(dim=-1)
    expected = attention.out((weights @ v).transpose(0, 1).reshape(1, 5, 32))
    torch.testing.assert_close(attention(x), expected)


def test_a_sequence_longer_than_seq_len_is_refused():
    with pytest.raises(ValueError, match="seq_len=16 long, got 17"):
        make_model()(random_tokens(1, 17))


def test_init_weights_is_a_function_of_the_seed_with_the_stated_widths():
    config = gpt.GPTConfig(dim=128, layers=8, heads=4, seq_len=16)
    first, again, other = make_model(config, 5), make_model(config, 5), make_model(config, 6)
    for (name, p), same, different in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(p, same)
        if p.ndim == 1:
            assert torch.equal(p, torch.ones_like(p))
            continue
        assert not torch.equal(p, different)
        residual = name.endswith(("attention.out.weight", "ffn.down.weight"))
        assert p.std().item() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.05), name


def test_the_first_loss_is_close_to_that_of_a_uniform_guess():
    model = make_model(gpt.GPTConfig(dim=64, layers=2, heads=2, seq_len=32))
    tokens = random_tokens(8, 33)
    loss = gpt.loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_loss_is_the_mean_over_all_tokens_in_fp32():
    logits = torch.zeros(1, 2, 4, dtype=torch.bfloat16)
    logits[0, 1, 3] = 2.0
    loss = gpt.loss_fn(logits, torch.tensor([[0, 3]]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((math.log(4) + math.log(3 + math.exp(2)) - 2) / 2, rel=1e-6)


def test_a_model_built_on_meta_has_real_tables_and_becomes_the_same_model():
    with torch.device("meta"):
        model = gpt.GPT(TINY)
    assert all(p.is_meta for p in model.parameters())
    direct = make_model(seed=3)
    for made, expected in zip(model.buffers(), direct.buffers(), strict=True):
        assert torch.equal(made, expected)
    model.to_empty(device="cpu")
    model.init_weights(seeded(3))
    model.reset_buffers(torch.device("cpu"))
    tokens = random_tokens(2, 16)
    assert torch.equal(model(tokens), direct(tokens))
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    model.to(torch.bfloat16).reset_buffers(torch.device("cpu"))  # undoes the rounding of the tables
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), direct.buffers(), strict=True))
    assert model(tokens).dtype == torch.bfloat16


def test_the_model_learns_one_batch_by_heart():
    model = make_model()
    tokens = random_tokens(2, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = gpt.loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# --- generate ---


def test_generate_shows_forward_the_last_seq_len_bytes_and_returns_the_new_ones():
    seen = []

    def next_byte(tokens: Tensor) -> Tensor:
        seen.append(bytes(tokens[0].tolist()))
        return torch.nn.functional.one_hot((tokens + 1) % 256, 256) * 100.0

    assert gpt.generate(next_byte, b"ab", 3, 0.0, seeded(0), seq_len=3) == b"cde"
    assert seen == [b"ab", b"abc", b"bcd"]
    assert gpt.generate(next_byte, b"ab", 3, 1.0, seeded(0), seq_len=3) == b"cde"


def test_generate_draws_by_the_temperature_and_the_generator_alone():
    model = make_model()

    def draw(seed: int, temperature: float, scale: float = 40.0) -> bytes:
        return gpt.generate(lambda x: scale * model(x), b"x", 12, temperature, seeded(seed), seq_len=16)

    assert draw(1, 1.0) == draw(1, 1.0) != draw(2, 1.0)
    assert draw(1, 2.0) == draw(1, 1.0, scale=20.0) != draw(1, 1.0)
    assert draw(1, 0.0) == draw(2, 0.0)
    with pytest.raises(ValueError, match=r"temperature .* -0\.5"):
        draw(1, -0.5)


# --- load_corpus, unigram_entropy ---


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Forty small packages and what must be left out of them."""
    for i in range(40):
        folder = tmp_path / f"p{i:02}"
        folder.mkdir()
        (folder / "a.py").write_bytes(b"%02d\n" % i * 10)
    for skipped in ("p00/test/t.py", "site-packages/s.py", "p01/__pycache__/c.py", "p02/notes.txt"):
        (tmp_path / skipped).parent.mkdir(exist_ok=True)
        (tmp_path / skipped).write_bytes(b"skipped")
    (tmp_path / "empty.py").write_bytes(b"")
    return tmp_path


def test_a_corpus_is_whole_files_each_on_one_side(tree):
    corpus = text.load_corpus(tree, valid_fraction=0.2)
    assert not set(corpus.train_files) & set(corpus.valid_files)
    assert sorted(corpus.train_files + corpus.valid_files) == [f"p{i:02}/a.py" for i in range(40)]
    for data, files in ((corpus.train, corpus.train_files), (corpus.valid, corpus.valid_files)):
        assert data.dtype == np.uint8
        assert data.tobytes() == b"".join((tree / name).read_bytes() for name in sorted(files))


def test_a_file_keeps_its_side_when_others_come_or_the_limit_changes(tree):
    whole = text.load_corpus(tree, valid_fraction=0.2)
    (tree / "new.py").write_bytes(b"new\n")
    grown = text.load_corpus(tree, valid_fraction=0.2)
    assert set(whole.train_files) <= set(grown.train_files) and set(whole.valid_files) <= set(grown.valid_files)
    part = text.load_corpus(tree, limit=920, valid_fraction=0.2)
    assert len(part.train) + len(part.valid) in (904, 900)  # thirty files of 30 bytes, with or without the new one
    assert set(part.train_files) <= set(grown.train_files) and set(part.valid_files) <= set(grown.valid_files)


def test_a_corpus_with_an_empty_side_is_refused(tree):
    with pytest.raises(ValueError, match=r"limit=30, valid_fraction=0.2: . files to train on, . held out"):
        text.load_corpus(tree, limit=30, valid_fraction=0.2)
    with pytest.raises(ValueError, match=r"valid_fraction .* 1\.5"):
        text.load_corpus(tree, valid_fraction=1.5)


def test_the_standard_library_is_a_corpus():
    corpus = text.load_corpus(limit=4_000_000)
    assert 2_000_000 < len(corpus.train) + len(corpus.valid) <= 4_000_000
    assert 0.01 < len(corpus.valid_files) / len(corpus.train_files) < 0.12
    assert not set(corpus.train_files) & set(corpus.valid_files)
    assert 2.5 < text.unigram_entropy(corpus.train, corpus.valid) < 4.0


def test_unigram_entropy_is_the_hand_computed_one():
    # Counts with one added: a 3, b 2, the 254 others 1; 259 in all.
    train, valid = as_bytes([97, 97, 98]), as_bytes([97, 98, 98, 99])
    expected = -(math.log(3 / 259) + 2 * math.log(2 / 259) + math.log(1 / 259)) / 4
    assert text.unigram_entropy(train, valid) == pytest.approx(expected, rel=1e-12)


# --- Batches, validation_batches ---

DATA = as_bytes(np.random.default_rng(0).integers(256, size=1000))


def rows(x: Tensor, y: Tensor) -> list[tuple[int, ...]]:
    """Each window as its seq_len + 1 bytes; y must be x one byte later."""
    assert x.dtype == y.dtype == torch.int64 and torch.equal(x[:, 1:], y[:, :-1])
    return [tuple(window) for window in torch.cat((x, y[:, -1:]), dim=1).tolist()]


def test_a_batch_draws_every_window_of_the_text_and_nothing_else():
    data = as_bytes(range(5))
    found = rows(*text.Batches(data, seq_len=2, batch_size=200, seed=0).batch(0, 0, 0, 1))
    assert set(found) == {(0, 1, 2), (1, 2, 3), (2, 3, 4)}


def test_a_batch_depends_on_its_arguments_alone():
    first = text.Batches(DATA, 8, 4, seed=7)
    late = first.batch(5, 0, 0, 1)
    for step in range(5):
        first.batch(step, 0, 0, 1)
    assert rows(*first.batch(5, 0, 0, 1)) == rows(*late)
    assert rows(*first.batch(6, 0, 0, 1)) != rows(*late)
    assert rows(*text.Batches(DATA, 8, 4, seed=8).batch(5, 0, 0, 1)) != rows(*late)


@pytest.mark.parametrize(("world", "micros"), [(2, 2), (4, 1), (1, 4), (2, 1), (1, 2)])
def test_ranks_and_microbatches_share_out_the_same_windows(world, micros):
    whole = rows(*text.Batches(DATA, 8, 8, seed=1).batch(2, 0, 0, 1))
    split = text.Batches(DATA, 8, 8, seed=1, micros=micros)
    parts = [rows(*split.batch(2, micro, rank, world)) for micro in range(micros) for rank in range(world)]
    assert [len(part) for part in parts] == [8 // (world * micros)] * (world * micros)
    assert [row for part in parts for row in part] == whole


def test_batches_that_cannot_be_shared_out_are_refused():
    with pytest.raises(ValueError, match="batch_size=8, micros=3"):
        text.Batches(DATA, 8, 8, seed=0, micros=3)
    with pytest.raises(ValueError, match="9 bytes, got 8"):
        text.Batches(DATA[:8], 8, 8, seed=0)
    with pytest.raises(ValueError, match="uint8"):
        text.Batches(DATA.astype(np.int64), 8, 8, seed=0)
    batches = text.Batches(DATA, 8, 8, seed=0, micros=2)
    with pytest.raises(ValueError, match=r"4 windows .* world=3"):
        batches.batch(0, 0, 0, 3)
    with pytest.raises(ValueError, match=r"micro must lie in 0\.\.1, got 2"):
        batches.batch(0, 2, 0, 1)


def test_validation_windows_are_evenly_spaced_and_divided_over_the_ranks():
    data = as_bytes(range(100))
    whole = [row for x, y in text.validation_batches(data, 9, 10, 5, 0, 1) for row in rows(x, y)]
    assert [row[0] for row in whole] == list(range(0, 100, 10))
    assert whole[-1] == tuple(range(90, 100))
    parts = [[rows(x, y) for x, y in text.validation_batches(data, 9, 10, 5, rank, 2)] for rank in range(2)]
    assert [len(part) for part in parts] == [1, 1]
    assert sorted(row for part in parts for batch in part for row in batch) == whole
    with pytest.raises(ValueError, match="windows=10, batch_size=3, world=2"):
        text.validation_batches(data, 9, 10, 3, 0, 2)
