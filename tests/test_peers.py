# SPDX-License-Identifier: Apache-2.0
"""The PyTorch peers of the benchmarks compute what they claim: a wrong peer is no peer.

Each is compared with the formula in float64, value and gradients, over clip distances inside and
beyond the length, causal and not, tables shared and per head, lengths that no block divides.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the peers of the benchmarks are written in PyTorch")

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from peers import torch_attention as peers  # noqa: E402
from peers import torch_schemes as scheme_peers  # noqa: E402
from peers import torch_stacks, torch_step, torch_training  # noqa: E402

torch.set_num_threads(1)  # threads of one tiny call only wait for each other

NAMES = ("q", "k", "v", "key_table", "value_table")
CASES = [  # n, clip, causal, a table per head
    (64, 4, False, False),
    (50, 16, True, True),
    (130, 64, False, True),
    (33, 64, True, False),
    (200, 16, False, False),
    (96, 1, True, False),
    (1, 3, False, False),
]


def inputs(n: int, clip: int, per_head: bool) -> tuple[list[Any], Any]:
    """q, k, v and both tables, and dout: B = 2, H = 3, D = 16."""
    torch.manual_seed(n)
    activations = [torch.randn(2, 3, n, 16) for _ in range(4)]
    shape = (3, 2 * clip + 1, 16) if per_head else (2 * clip + 1, 16)
    tables = [torch.randn(shape) for _ in range(2)]
    return [*activations[:3], *tables], activations[3]


def oracle(
    q: Any, k: Any, v: Any, key_table: Any, value_table: Any, causal: bool, key_only: bool
) -> Any:
    """The formula of the file's head with its [N, N, D] arrays."""
    n, clip = q.shape[-2], key_table.shape[-2] // 2
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    relation = distance.clamp(-clip, clip) + clip
    to_relation = (q[..., :, None, :] * key_table[..., relation, :]).sum(-1)
    scores = (q @ k.mT + to_relation) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(distance > 0, -math.inf)
    p = scores.softmax(-1)
    if key_only:
        return p @ v
    return p @ v + (p[..., None] * value_table[..., relation, :]).sum(-2)


def assert_near(name: str, ours: Any, exact: Any, tolerance: float = 3e-6) -> None:
    """Largest error over largest value. Measured: at most 1.1e-6 in all cases above."""
    error = float((ours.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30))
    assert error < tolerance, f"{name}: {error:.1e} of the largest value"


def compare(peer: Any, case: tuple[int, int, bool, bool], **options: Any) -> None:
    n, clip, causal, per_head = case
    arrays, dout = inputs(n, clip, per_head)
    leaves = [a.requires_grad_() for a in arrays]
    exact = [a.detach().double().requires_grad_() for a in arrays]
    out = peer(*leaves, causal=causal, **options)
    expected = oracle(*exact, causal=causal, key_only=False)
    assert_near("out", out.detach(), expected.detach())
    ours = torch.autograd.grad(out, leaves, dout)
    theirs = torch.autograd.grad(expected, exact, dout.double())
    for name, a, b in zip(NAMES, ours, theirs, strict=True):
        assert_near(f"d{name}", a, b)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("peer", [peers.gather, peers.skewed], ids=["gather", "skewed"])
def test_whole_matrix_peer_against_float64(peer: Any, case: Any) -> None:
    compare(peer, case)


@pytest.mark.parametrize("block", [0, 32, 48])
@pytest.mark.parametrize("case", CASES)
def test_tiled_peer_against_float64(case: Any, block: int) -> None:
    compare(peers.tiled, case, block=block)


def test_plain_is_the_formula_with_zero_tables() -> None:
    arrays, _ = inputs(40, 2, False)
    exact = [a.double() for a in arrays[:3]] + [torch.zeros(5, 16).double()] * 2
    for causal in (False, True):
        expected = oracle(*exact, causal=causal, key_only=False)
        assert_near("out", peers.plain(*arrays[:3], causal=causal), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:2])
def test_compiled_peer_against_float64(case: Any) -> None:
    compare(peers.PEERS["skewed compiled"], case)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_flex_peer_has_the_key_term(causal: bool) -> None:
    """Forward only: FlexAttention has no backward on the CPU."""
    arrays, _ = inputs(64, 4, False)
    exact = oracle(*(a.double() for a in arrays), causal=causal, key_only=True)
    assert_near("out", peers.flex(*arrays, causal=causal), exact)


# --------------------------------------------------------------------------------------------------
# The peers of bench_schemes.py
# --------------------------------------------------------------------------------------------------

LENGTHS = (50, 130, 200)  # of the band, some blocks, a last one that is short


def scheme_case(scheme: str, n: int, heads: int = 3, width: int = 16) -> Any:
    """q, k, v, the parameters, what takes no gradient, and the whole formula of the scores.

    The formula is that of docs/schemes.md, an index matrix for every pair, and no more.
    """
    from relpos.position import alibi_slopes, deberta_log_buckets, t5_buckets

    torch.manual_seed(n)
    q, k, v = (torch.randn(2, heads, n, width) for _ in range(3))
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    every = torch.arange(1 - n, n)
    scale = width**-0.5

    def met(x: Any, table: Any, index: Any) -> Any:
        """x_i . table[index_ij], by the [N, N, D] array."""
        return (x[..., :, None, :] * table[..., index, :]).sum(-1)

    if scheme == "t5":
        table = torch.randn(32, heads)
        index = torch.from_numpy(t5_buckets(distance.numpy()))
        return (q, k, v, table), torch.from_numpy(t5_buckets(every.numpy())), (
            lambda q, k, v, table, e: q @ k.mT + table[index].permute(2, 0, 1)
        )  # fmt: skip
    if scheme == "alibi":
        slopes = torch.from_numpy(alibi_slopes(heads)).float()
        return (q, k, v), slopes, (
            lambda q, k, v, slopes: q @ k.mT * scale - slopes[:, None, None] * distance.abs()
        )  # fmt: skip
    if scheme == "labels":
        labels = torch.randint(0, 51, (n, n))
        tables = torch.randn(2, 51, width)
        return (q, k, v, tables[0], tables[1]), labels, (
            lambda q, k, v, key, value, e: (q @ k.mT + met(q, key, labels)) * scale
        )  # fmt: skip
    if scheme == "shaw unclipped":
        return (q, k, v, torch.randn(2 * n - 1, width)), torch.arange(2 * n - 1), (
            lambda q, k, v, table, e: (q @ k.mT + met(q, table, distance + n - 1)) * scale
        )  # fmt: skip
    if scheme == "transformer-xl":
        own = (
            torch.randn(heads * width, 24) / 5,
            torch.randn(heads, width),
            torch.randn(heads, width),
        )

        def scores(q: Any, k: Any, v: Any, weight: Any, u: Any, bias: Any, waves: Any) -> Any:
            table = (waves @ weight.mT).unflatten(-1, (heads, width)).transpose(0, 1)
            position = met(q + bias[:, None], table, distance + n - 1)
            return ((q + u[:, None]) @ k.mT + position) * scale

        return (q, k, v, *own), torch.randn(2 * n - 1, 24), scores
    span = 16  # of DeBERTa: clipped within the length

    def delta(d: Any) -> Any:
        buckets = torch.from_numpy(deberta_log_buckets(-d.numpy(), span, 2 * span))
        return (buckets + span).clamp(0, 2 * span - 1)

    index = delta(distance)
    tables = torch.randn(2, 2 * span, width)
    return (q, k, v, tables[0], tables[1]), delta(every), (
        lambda q, k, v, key, query, e: (q @ k.mT + met(q, key, index) + met(k, query, index.mT).mT)
        * (3 * width) ** -0.5
    )  # fmt: skip


def check_scheme_peer(scheme: str, name: str, n: int) -> None:
    inputs, extra, scores = scheme_case(scheme, n)
    leaves = [a.requires_grad_(name != "flex") for a in inputs]  # which has no backward on the CPU
    exact = [a.detach().double().requires_grad_() for a in inputs]
    out = scheme_peers.PEERS[scheme][name](*leaves, extra)
    p = scores(*exact, extra.double() if extra.is_floating_point() else extra).softmax(-1)
    expected = p @ exact[2]
    if scheme == "labels":
        expected = expected + (p[..., None] * exact[4][extra]).sum(-2)
    assert_near("out", out.detach(), expected.detach())
    if name == "flex":
        return
    dout = torch.randn(out.shape)
    got = torch.autograd.grad(out, leaves, dout)
    for i, (a, b) in enumerate(
        zip(got, torch.autograd.grad(expected, exact, dout.double()), strict=True)
    ):
        assert_near(f"gradient {i}", a, b)


def peer_names(compiled: bool) -> list[tuple[str, str]]:
    return [
        (scheme, name)
        for scheme, peers in scheme_peers.PEERS.items()
        for name in peers
        if (name == "flex" or "compiled" in name) == compiled
    ]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize(("scheme", "name"), peer_names(compiled=False))
def test_scheme_peer_against_float64(scheme: str, name: str, n: int) -> None:
    check_scheme_peer(scheme, name, n)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "name"), peer_names(compiled=True))
def test_compiled_scheme_peer_against_float64(scheme: str, name: str) -> None:
    check_scheme_peer(scheme, name, LENGTHS[0])


@pytest.mark.parametrize("scheme", list(scheme_peers.PEERS))
def test_scheme_peer_and_relpos_are_given_the_same(scheme: str) -> None:
    """What bench_schemes.py times on both sides is one function of the same numbers."""
    import bench_schemes

    case = {"scheme": scheme, "n": 140, "B": 1, "H": 3, "d": 16, "pass": "fwd", "threads": 1}
    case["precision"] = "f32"
    ours = bench_schemes.build_ours(case, plain=False).call()
    name = next(iter(scheme_peers.PEERS[scheme]))
    theirs = bench_schemes.build_torch(case, name).call()
    assert_near("out", torch.from_numpy(ours), theirs.double(), 1e-5)


# --------------------------------------------------------------------------------------------------
# The peers of bench_step.py
# --------------------------------------------------------------------------------------------------

STEP = torch_training.Shape(
    width=24, heads=3, feed_forward=20, vocabulary=17, encoder_layers=2, decoder_layers=2, k=3,
    dropout=0.0, clip_norm=0.0,
)  # fmt: skip
STEP_SHAPES = {
    "norm before": STEP,
    "norm after, no biases": replace(STEP, pre_norm=False, bias=False),
    "tables of all heads": replace(STEP, per_head=False),
}


def step_batch(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, STEP.vocabulary, (4, n), generator=generator) for n in (9, 7, 7)]
    return torch_training.Batch(*ids)


def settings_of(shape: Any, relative: bool) -> Any:
    """The same model as fields of relpos."""
    import relpos

    same = {
        "width": shape.width, "heads": shape.heads, "feed_forward": shape.feed_forward,
        "source_vocabulary": shape.vocabulary, "target_vocabulary": shape.vocabulary,
        "norm": "pre" if shape.pre_norm else "post", "norm_epsilon": shape.norm_epsilon,
        "bias": shape.bias, "label_smoothing": shape.smoothing, "max_length": 16,
    }  # fmt: skip
    for stack in ("encoder", "decoder"):
        same |= {
            f"{stack}.layers": shape.layers(stack),
            f"{stack}.position": "shaw" if relative else "none",
            f"{stack}.absolute": "none" if relative else "sinusoidal",
            f"{stack}.sinusoid_interleaved": True,
            f"{stack}.k": shape.k,
            f"{stack}.per_head": shape.per_head,
        }
    return dict(relpos.Config.preset("tiny").replace(same).pairs()).__getitem__


def names_of_relpos(parameters: Any) -> dict[str, Any]:
    """Arrays of a peer under relpos's names: cross-attention's three projections are two there."""
    named = {}
    for name, x in parameters.items():
        if ".cross.qkv." in name:
            width = len(x) // 3
            named[name.replace("qkv", "q")], named[name.replace("qkv", "kv")] = x[:width], x[width:]
        else:
            named[name] = x
    return named


def check_step_peer(name: str, shape: Any, lengths: tuple[int, ...] = (7, 7, 7, 7)) -> None:
    """lengths: of the targets; what is beyond is padding."""
    from model_torch import Pair, TorchModel, gradients

    batch = step_batch()
    counted = torch.tensor([7 * i + j for i, n in enumerate(lengths) for j in range(n)])
    pairs = [
        Pair(batch.source[i].tolist(), *(x[i, :n].tolist() for x in (batch.target, batch.labels)))
        for i, n in enumerate(lengths)
    ]
    if min(lengths) < 7:
        batch = replace(batch, labels=batch.labels.flatten()[counted], counted=counted)
    step = torch_step.PEERS[name](shape, batch)
    for parameter in step.parameters.values():  # away from ones and zeros
        parameter.data += 0.1 * torch.randn(parameter.shape)
    loss = float(step.gradients())
    settings = settings_of(shape, any("table" in name for name in step.parameters))
    weights = {n: p.detach().numpy() for n, p in names_of_relpos(step.parameters).items()}
    exact, count, expected = gradients(TorchModel(settings), weights, pairs, torch.float64)
    assert count == len(counted)
    assert abs(loss - exact / count) < 1e-5 * loss
    got = names_of_relpos({n: p.grad for n, p in step.parameters.items()})
    assert set(got) == set(expected)
    size = max(float(g.abs().max()) for g in expected.values()) / count
    for parameter, gradient in expected.items():
        error = float((got[parameter].double() - gradient / count).abs().max())
        assert error < 1e-5 * size, f"{parameter}: {error:.1e}, the largest gradient is {size:.1e}"


def step_peers(compiled: bool) -> list[str]:
    return [n for n in torch_step.PEERS if "OpenNMT" not in n and ("compiled" in n) == compiled]


@pytest.mark.parametrize("shape", STEP_SHAPES.values(), ids=STEP_SHAPES)
@pytest.mark.parametrize("name", step_peers(compiled=False))
def test_step_peer_against_float64(name: str, shape: Any) -> None:
    check_step_peer(name, shape)


def test_step_peer_with_padded_targets() -> None:
    check_step_peer("eager", STEP, lengths=(7, 5, 1, 6))


@pytest.mark.slow
@pytest.mark.parametrize("name", step_peers(compiled=True))
def test_compiled_step_peer_against_float64(name: str) -> None:
    check_step_peer(name, STEP)


def test_the_peers_loss_under_autocast() -> None:
    """Operands of its three products are rounded, to half a unit in 8 bits, and nothing else is."""
    torch.manual_seed(0)
    hidden, table = torch.randn(1000, 24), torch.randn(40, 24).requires_grad_()
    labels = torch.randint(40, (1000,))
    output, found = torch_training.Output(table, 0.1), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, dhidden = output(hidden, labels)
        assert loss.dtype == dhidden.dtype == table.grad.dtype == torch.float32
        found.append((loss, dhidden, table.grad.clone()))
    for exact, rounded in zip(*found, strict=True):
        assert 0 < (rounded - exact).norm() < 4 * 2.0**-8 * exact.norm()


@pytest.mark.parametrize("name", [n for n in step_peers(compiled=False) if "oneDNN" not in n])
def test_step_peers_under_autocast(name: str) -> None:
    """The same gradients, with some dozen products of operands that are off by half a unit in 8
    bits one after the other, and as many on the way back."""
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        step = torch_step.PEERS[name](STEP, step_batch())
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = step.gradients()
        found.append([float(loss), *(p.grad.clone() for p in step.parameters.values())])
    (loss, *exact), (near, *rounded) = found
    assert 0 < abs(near - loss) <= 12 * 2.0**-9 * loss
    off = sum(float((a - b).square().sum()) for a, b in zip(exact, rounded, strict=True))
    assert off**0.5 <= 24 * 2.0**-9 * sum(float(g.square().sum()) for g in exact) ** 0.5


@pytest.mark.parametrize("rate", [26 / 256, 0.5])
def test_the_peers_dropout(rate: float) -> None:
    """Drops as many as it should, and makes up for them."""
    x = torch.ones(400_000)
    kept = torch_stacks.drop(x, rate)
    share = float((kept == 0).float().mean())
    assert abs(share - rate) < 5 * math.sqrt(rate * (1 - rate) / len(x))
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)])


def test_the_peers_attention_with_dropout_and_relations() -> None:
    """Its own backward beside autograd over the compiler's formula, with the same mask."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 9, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    tables = [torch.randn(3, 7, 8, dtype=torch.float64).requires_grad_() for _ in range(2)]
    dout = torch.randn_like(q)
    torch_stacks.register_bytes()
    results = []
    for attend in (torch_stacks.attend_eagerly, torch_stacks.attend):
        torch.manual_seed(1)
        out = attend(q, k, v, True, 0.25, *tables)
        results.append([out, *torch.autograd.grad(out, (q, k, v, *tables), dout)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.view_as(theirs), theirs)


def test_a_step_learns() -> None:
    """Loss falls over updates, with clipping and dropout."""
    shape = replace(STEP, dropout=0.1, clip_norm=1.0, learning_rate=1e-2)
    for name in ("eager", "nn.Transformer as written"):
        step = torch_step.PEERS[name](shape, step_batch())
        losses = [step.step() for _ in range(30)]
        assert losses[-1] < losses[0] - 0.5, name


@pytest.mark.parametrize("model", ["base", "small"])
def test_step_peers_and_relpos_are_given_the_same(model: str) -> None:
    """Parameters of the same names and shapes: what bench_step.py times is one model."""
    import bench_step
    import relpos

    case = {"model": model, "tokens": 64, "length": 32}
    config = bench_step.config_of(case).replace({"encoder.layers": 1, "decoder.layers": 1})
    ours = relpos.Transformer(config, tokens=1, sentences=1, training=False).parameters
    theirs = torch_stacks.initial(bench_step.shape_of(config))
    assert {n: tuple(p.shape) for n, p in theirs.items()} == {n: p.shape for n, p in ours.items()}
    (lengths,) = bench_step.lengths_of(case)
    batch = bench_step.batch_of(config, lengths, padded=False)
    assert (len(batch.source), len(batch.target), batch.sentences) == (64, 64, 2)


@pytest.mark.parametrize("order", ["random", "sorted"])
def test_padded_batches_train_the_same_tokens(order: str) -> None:
    """What padding adds is not counted."""
    import bench_step
    import relpos

    config = relpos.Config.preset("tiny")
    (lengths,) = bench_step.real_lengths(order, 1, bench_step.TOKENS)
    packed, padded = (bench_step.batch_of(config, lengths, padded=p) for p in (False, True))
    assert len(packed.target) == sum(m + 1 for _, m in lengths) <= bench_step.TOKENS
    assert len(padded.target) == len(lengths) * (max(m for _, m in lengths) + 1)
    assert len(padded.source) == len(lengths) * max(n for n, _ in lengths)
    assert (padded.labels >= 0).sum() == (packed.labels >= 0).sum() == len(packed.target)
    assert padded.labels[padded.labels >= 0].tolist() == packed.labels.tolist()


# --------------------------------------------------------------------------------------------------
# The twin of twin_multi30k.py
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"decoder.per_head": False}, {"encoder.position": "none"}])
def test_the_twin_against_float64(changes: dict[str, Any]) -> None:
    """Sentences of all lengths, padded, have the loss and the gradients of each by itself."""
    import numpy as np

    import relpos
    from model_torch import Pair, TorchModel, gradients
    from peers.torch_twin import Twin, padded_batch

    rates = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    config = relpos.Config.preset("tiny").replace(rates | changes)
    weights = relpos.Transformer(config, tokens=64, sentences=4).parameters
    weights = {name: x.astype(np.float64) for name, x in weights.items()}
    draw = np.random.default_rng(0)
    sources, targets = (
        [draw.integers(3, config.target_vocabulary, n) for n in lengths]
        for lengths in ((5, 1, 20), (2, 9, 14))
    )
    twin = Twin(config, weights)
    loss = twin.loss(*padded_batch(relpos.Batch.from_pairs(sources, targets, bos=1, eos=2)))
    loss.backward()
    pairs = [
        Pair(source.tolist(), [1, *target], [*target, 2])
        for source, target in zip(sources, targets, strict=True)
    ]
    settings = dict(config.pairs()).__getitem__
    exact, count, expected = gradients(TorchModel(settings), weights, pairs, torch.float64)
    assert abs(loss.item() - exact / count) < 1e-12 * exact
    assert set(twin.p) == set(expected)
    for name, gradient in expected.items():
        error = float((twin.p[name].grad - gradient / count).abs().max())
        assert error < 1e-10 * float(gradient.abs().max()), name


def test_the_twins_update() -> None:
    """Noam's rate and the clipped norm: updates of relpos from the same gradients."""
    import relpos
    from peers.torch_twin import Adam, Twin, padded_batch

    rates = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    noam = {"schedule": "noam", "warmup": 3, "learning_rate": 0.1, "clip_norm": 0.5}
    config = relpos.Config.preset("tiny").replace(rates | noam)
    model = relpos.Transformer(config, tokens=64, sentences=4)
    before = {name: x.copy() for name, x in model.parameters.items()}
    twin = Twin(config, before)
    adam = Adam(twin)
    batch = relpos.Batch.from_pairs([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]], bos=1, eos=2)
    for _ in range(6):
        loss = twin.loss(*padded_batch(batch))
        loss.backward()
        adam.step()
        assert abs(model.step(batch).loss - loss.item()) < 1e-4 * loss.item()
