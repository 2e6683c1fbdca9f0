"""Structure of the operator graph, semantics in evaluation, refusals."""

import json
import resource

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpp.capture.build import capture
from gpp.capture.codec import is_random
from gpp.capture.emit import every_argument, python_function
from gpp.capture.stage import build_stage, initial_state
from gpp.errors import CaptureError, InvalidConfig
from gpp.graph.captured import Captured, capture_key, evaluate, load_cached, store
from gpp.serialization import from_json, to_json
from tests.support.capture_zoo import CASES, Fixed, ManyOutputs, Masked, Normed, Tied, accuracy, cross_entropy, floats, many, mse
from tests.support.cutting import build_stages, named, random_parts, run_pipeline
from tests.support.long import thinned


def small(forward, **modules):
    """A module with the given submodules and forward."""
    kind = type("Small", (nn.Module,), {"forward": forward})
    module = kind()
    for name, child in modules.items():
        module.add_module(name, child)
    return module


def capture_case(name):
    kind, make, loss, metrics = CASES[name]
    torch.manual_seed(0)
    model = kind().double()
    return model, capture(model, *make(3), loss, metrics, name=name)


def test_sizes_join_no_branches():
    _, captured = capture_case("two_tower")
    graph = captured.graph
    bags = [i for i, op in enumerate(graph.ops) if op.kind == "embedding"]
    assert len(bags) == 3 and not any(graph.predecessors[i] for i in bags)
    dense = graph.ops[[op.name for op in graph.ops].index("dense.0")]
    assert "dense.0.weight" in dense.params
    assert any(shape == ["mul", 3, "b"] for node in captured.nodes for shape in node.shape or ())


def test_an_updated_buffer_lives_in_one_operator():
    _, captured = capture_case("normed")
    for buffer in ("bn.running_mean", "bn.num_batches_tracked"):
        touching = [
            op.name
            for op in captured.graph.ops
            for n in op.nodes
            if any(ref["ref"] == buffer for ref in captured.node_of[n].args if isinstance(ref, dict))
        ]
        assert set(touching) == {"bn"}


def test_in_place_writes_join_their_neighbours_only():
    _, captured = capture_case("in_place")
    joined = [op for op in captured.graph.ops if any("relu_" in n for n in op.nodes)]
    assert len(joined) == 4 and captured.graph.num_ops > 10
    assert all("conv" not in captured.node_of[n].target for op in joined for n in op.nodes)
    homes = [op.name for op in captured.graph.ops if any("average" in captured.node_of[n].mutates for n in op.nodes)]
    assert len(homes) == 1


def test_noise_is_an_operator_and_queries_are_not():
    _, captured = capture_case("auxiliary")
    names = {op.name for op in captured.graph.ops}
    assert "randn" in names and {"gate", "out", "loss"} <= names and not any("expand" in name for name in names)
    (mixing,) = [op for op in captured.graph.ops if "mix.bias" in op.params]
    assert set(mixing.params) == {"gain", "mix.weight", "mix.bias"}
    assert "draws random numbers" in captured.warnings[0]
    assert not captured.node_of[next(n for op in captured.graph.ops if op.name == "randn" for n in op.nodes)].requires_grad


def test_json_form_reads_back_equal_and_free_nodes_belong_to_no_operator(tmp_path):
    _, captured = capture_case("masked")
    assert from_json(Captured, to_json(captured)) == captured
    key = capture_key({"model": "masked", "size": 3})
    assert load_cached(key, tmp_path) is None and key != capture_key({"model": "masked", "size": 4})
    store(key, captured, tmp_path)
    assert load_cached(key, tmp_path) == captured
    (tmp_path / f"{key}.json").write_text("{}")
    assert load_cached(key, tmp_path) is None
    in_ops = [n for op in captured.graph.ops for n in op.nodes]
    assert len(in_ops) == len(set(in_ops))
    assert {n.name for n in captured.nodes if n.kind == "call" and not n.free} == set(in_ops)
    assert "arange" not in json.dumps([op.name for op in captured.graph.ops])
    assert evaluate(["floordiv", ["add", 1, ["mul", 3, "b"]], 2], 5) == 8


def test_tied_weights_are_one_parameter_with_both_names():
    model, captured = capture_case("tied")
    (param,) = [p for p in captured.graph.params if p.aliases]
    assert (param.name, param.aliases) == ("emb.weight", ("head.weight",))
    readers = [op.name for op in captured.graph.ops if "emb.weight" in op.params]
    assert readers == ["emb", "head"]
    with torch.device("meta"):
        again = capture(
            Tied().double(),
            (torch.zeros(2, 3, dtype=torch.int64),),
            torch.zeros(2, dtype=torch.int64),
            cross_entropy,
            {"accuracy": accuracy},
            name="tied",
        )
    assert again == captured and set(initial_state(model, captured)) == {"emb.weight", "mid.weight", "mid.bias"}


def test_costs_of_a_linear_layer():
    model = small(lambda self, x: self.b(self.a(x).relu()), a=nn.Linear(6, 5), b=nn.Linear(5, 2))
    captured = capture(model, (torch.zeros(2, 6),), torch.zeros(2, 2), mse, name="mlp")
    ops = {op.name: op for op in captured.graph.ops}
    assert list(ops) == ["a", "relu", "b", "loss"]
    assert ops["a"].forward_flops == 2 * 6 * 5 and ops["a"].backward_flops == 2 * 6 * 5  # no gradient of the input
    assert ops["b"].backward_flops == 2 * 2 * 5 * 2
    # The activation, once; the input's rows are there for whole mini-batches.
    assert ops["a"].saved_bytes == 0 and ops["relu"].saved_bytes == 5 * 4
    assert ops["a"].inputs == ("x",) and ops["loss"].inputs == ("target:target",)
    assert [(given.name, given.bytes_per_sample) for given in captured.graph.inputs] == [("x", 6 * 4), ("target:target", 2 * 4)]
    # A gradient comes in and the weight's is made; the loss makes its own.
    assert ops["a"].transient_bytes >= 5 * 4 and ops["a"].fixed_bytes >= 6 * 5 * 4
    assert ops["a"].traffic_bytes == (6 + 5) * 4 and ops["a"].num_kernels == 1 and ops["loss"].kind == "loss"
    tensors = {t.name: t for t in captured.graph.tensors}
    assert [(t.saved, t.bytes_per_sample) for t in tensors.values()] == [(False, 20), (True, 20), (True, 8)]
    assert captured.graph.dtype == "float32"


def test_attention_and_recurrence_have_flops():
    def forward(self, x):
        h = self.rnn(x)[0]
        return F.scaled_dot_product_attention(h, h, h).mean(1)

    model = small(forward, rnn=nn.LSTM(4, 8, batch_first=True))
    captured = capture(model, (torch.zeros(2, 5, 4),), torch.zeros(2, 8), mse, name="rnn")
    ops = {op.kind: op for op in captured.graph.ops}
    assert ops["recurrent"].forward_flops == 2 * 5 * (4 * 32 + 8 * 32)
    assert ops["attention"].forward_flops == 2 * 2 * 5 * 5 * 8 and ops["attention"].backward_flops > 0


@pytest.mark.parametrize("dtype", thinned([torch.float32, torch.float64]))
def test_recurrent_layers_keep_gates_and_cells(dtype):
    """oneDNN, which computes float32, does not say what it keeps."""
    model = small(lambda self, x: self.rnn(x)[0].mean(1), rnn=nn.LSTM(4, 8, batch_first=True, bidirectional=True)).to(dtype)
    captured = capture(model, (torch.zeros(2, 5, 4, dtype=dtype),), torch.zeros(2, 16, dtype=dtype), mse, name="rnn")
    (op,) = [op for op in captured.graph.ops if op.kind == "recurrent"]
    step = 2 * 7 * 8 * dtype.itemsize  # both ways: four gates, two forms of the cell, the state
    assert 5 * step <= op.saved_bytes + 5 * 16 * dtype.itemsize <= 1.6 * 5 * step


def test_detached_and_integer_tensors_take_no_gradient():
    _, captured = capture_case("many_outputs")
    flags = {t.name: t.differentiable for t in captured.graph.tensors}
    softmax = next(n for n in captured.nodes if "softmax" in n.target)
    assert softmax.no_grad and not flags[softmax.name if softmax.name in flags else "sum_1"]
    assert True in flags.values()


@pytest.mark.parametrize("name", thinned(["normed", "masked", "tied", "in_place"]))
def test_evaluation_equals_the_model_in_eval_mode(name):
    model, captured = capture_case(name)
    _, make, loss, metrics = CASES[name]
    inputs, targets = make(4)
    stages = build_stages(captured, model, random_parts(captured.graph, 3, 0))
    before = {n: b.clone() for stage in stages for n, b in stage.named_buffers()}
    values = named(captured, inputs, targets)
    with torch.no_grad():
        for stage in stages:
            module = stage.eval_module()
            assert {n: id(p) for n, p in module.named_parameters()} == {n: id(p) for n, p in stage.named_parameters()}
            values |= module(4, values)
        model.eval()
        outputs = model(*inputs)
    assert torch.equal(values["loss"], loss(outputs, targets))
    for metric, function in metrics.items():
        assert torch.equal(values[f"metric:{metric}"], function(outputs, targets))
    assert all(torch.equal(b, before[n]) for stage in stages for n, b in stage.named_buffers())


def test_training_returns_the_loss_only_and_knows_randomness():
    model, captured = capture_case("tied")
    stages = build_stages(captured, model, [range(captured.graph.num_ops)])
    assert stages[0].results == ("loss", "metric:accuracy") and not stages[0].has_random
    _, dropping = capture_case("normed")
    whole = build_stage(dropping, [n for op in dropping.graph.ops for n in op.nodes], device="cpu")
    assert whole.has_random and not whole.eval_module().has_random
    assert set(whole.state_dict()) == set(Normed().state_dict())


def test_another_float_type():
    model, captured = capture_case("masked")
    _, make, _, _ = CASES["masked"]
    stages = build_stages(captured, model, random_parts(captured.graph, 3, 1), dtype_of_floats=torch.bfloat16)
    loss, grads = run_pipeline(stages, named(captured, *make(2)), 2)
    assert loss.dtype == torch.bfloat16 and {g.dtype for g in grads.values()} == {torch.bfloat16}


def test_constants_reach_the_worker():
    model, captured = capture_case("masked")
    state = initial_state(model, captured)
    assert {"ids", "scale"} <= set(state) and torch.equal(state["scale"], model.scale)
    whole = build_stage(captured, [n for op in captured.graph.ops for n in op.nodes], device="cpu")
    with pytest.raises(CaptureError, match="has no tensor"):
        whole.load({})
    assert "ids" not in whole.state_dict() and dict(whole.named_buffers())["scale"].tolist() == [0.5, 2.0]


def test_a_fixed_batch_is_captured_with_the_reason():
    model = Fixed().double()
    captured = capture(model, (floats(3, 4),), floats(3, 2), mse, name="fixed")
    assert captured.batch == 3 and "view" in captured.warnings[0] and "makes a constant" in captured.warnings[0]
    stages = build_stages(captured, model, random_parts(captured.graph, 2, 0))
    x, y = floats(3, 4), floats(3, 2)
    loss, _ = run_pipeline(stages, named(captured, (x,), y), 3)
    assert torch.equal(loss, mse(model(x), y).detach())
    other = capture(model, (floats(6, 4),), floats(6, 2), mse, name="fixed", batch=3)
    assert other.batch == 3 and "zoo.py" in other.warnings[0] and other.graph == captured.graph


def test_a_decision_on_data_is_refused_with_the_users_line():
    def forward(self, x):
        y = self.a(x)
        if y.sum().item() > 0:
            return y
        return -y

    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+: if y\.sum\(\)\.item\(\) > 0.*Fix: .*rewrite that line"):
        capture(small(forward, a=nn.Linear(3, 3)), (torch.zeros(2, 3),), torch.zeros(2, 3), mse, name="m")


class Selecting(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y[y[:, 0] > 0].sum(-1)


class Scaling(nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.max().item()


class Doubled(nn.Linear):
    def forward(self, x):
        return Doubling.apply(super().forward(x))


class Numpy(nn.Linear):
    def forward(self, x):
        return torch.from_numpy(super().forward(x).detach().numpy())


class Freezing(nn.Linear):
    def forward(self, x):
        self.requires_grad_(False)
        return super().forward(x)


class Thawing(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.bias.requires_grad = False

    def forward(self, x):
        x.requires_grad_()  # which changes nothing that is trained
        self.bias.requires_grad = True
        return super().forward(x)


class Packed(nn.LSTM):
    def forward(self, x):
        lengths = torch.full((len(x),), 1)
        return super().forward(nn.utils.rnn.pack_padded_sequence(x[:, None], lengths, batch_first=True))[1][0]


class Connectionist(nn.Linear):
    def forward(self, x):
        lengths = [1] * 2
        return nn.CTCLoss()(super().forward(x)[None].log_softmax(-1), torch.ones(2, 1, dtype=torch.long), lengths, lengths)


class Cast(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).relu()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Selecting, r"aten\.index\.Tensor at .*test_capture\.py:\d+: return y\[.*size.*mask instead"),
        (Scaling, r"aten\.mul\.Tensor at .*test_capture\.py:\d+: return.*data-dependent.*keep it a tensor"),
        (Doubled, r"Doubling is a torch\.autograd\.Function at .*test_capture\.py:\d+.*own backward"),
        (Numpy, r"test_capture\.py:\d+: return torch.from_numpy.*numpy"),
        (
            Freezing,
            r"requires_grad of weight to False at .*test_capture\.py:\d+: self\.requires_grad_\(False\); .*Fix: set it before",
        ),
        (Thawing, r"requires_grad of bias to True at .*test_capture\.py:\d+: self\.bias\.requires_grad = True"),
        (Packed, r"pack_padded_sequence at .*test_capture\.py:\d+: return super.*Fix: give .* the padded tensor"),
        (Connectionist, r"ctc_loss at .*test_capture\.py:\d+: return nn\.CTCLoss.*Fix: make both of its passes one operator"),
        (Cast, r"autocast at .*test_capture\.py:\d+: return.*dtype=bfloat16"),
    ],
)
def test_what_cannot_be_captured_is_named(kind, message):
    with pytest.raises(CaptureError, match=message):
        capture(kind(3, 3), (torch.zeros(2, 3),), torch.zeros(2, 3), lambda o, t: o.mean(), name="m")


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_checkpoint_is_noted():
    for reentrant in (True, False):

        def forward(self, x, reentrant=reentrant):
            return checkpoint(self.a, x, use_reentrant=reentrant)

        model = small(forward, a=nn.Linear(3, 3))
        captured = capture(model, (torch.zeros(2, 3),), torch.zeros(2, 3), mse, name="m")
        assert "checkpoint at" in captured.warnings[0] and "test_capture.py" in captured.warnings[0]
        assert all(t.differentiable for t in captured.graph.tensors)


def test_unusable_examples_are_refused():
    model = small(lambda self, x: self.a(x), a=nn.Linear(3, 3))
    with pytest.raises(InvalidConfig, match="at least 2"):
        capture(model, (torch.zeros(1, 3),), torch.zeros(1, 3), mse, name="m")
    with pytest.raises(InvalidConfig, match="same batch size"):
        capture(model, (torch.zeros(2, 3),), torch.zeros(3, 3), mse, name="m")
    with pytest.raises(CaptureError, match="scalar"):
        capture(model, (torch.zeros(2, 3),), torch.zeros(2, 3), lambda o, t: o, name="m")


def test_only_registered_operators_are_run():
    _, captured = capture_case("residual")
    text = to_json(captured).replace("aten.tanh.default", "os.system.default")
    bad = from_json(Captured, text)
    with pytest.raises(CaptureError, match="not registered"):
        build_stage(bad, [n for op in bad.graph.ops for n in op.nodes], device="cpu")


def test_a_model_on_the_meta_device_stays_there_and_tensors_in_its_code_fit():
    with torch.device("meta"):
        model = Masked()
    inputs = (torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.bool))
    captured = capture(model, inputs, torch.zeros(2, dtype=torch.int64), cross_entropy, name="masked")
    assert all(p.is_meta for p in model.parameters()) and captured.graph.dtype == "float32"


def test_a_loss_with_parts_before_it_does_not_swallow_the_model():
    def loss(outputs, targets):
        return many(outputs, targets) + outputs["left"].abs().mean()

    captured = capture(ManyOutputs().double(), (floats(2, 4),), {"l": floats(2, 2), "r": floats(2)}, loss, name="m")
    assert {"trunk", "left", "right", "loss"} <= {op.name for op in captured.graph.ops}


def test_a_large_model_on_the_meta_device_allocates_nothing():
    def forward(self, x):
        return self.layers(x)

    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(8192, 64, 32768, batch_first=True)
        model = small(forward, layers=nn.Sequential(layer, nn.Linear(8192, 8192)))  # 3.5 GB of weights
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    example = torch.zeros(2, 512, 8192, device="meta")
    captured = capture(model, (example,), example, mse, name="big")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kilobytes
    assert sum(param.num_bytes for param in captured.graph.params) > 3.2e9
    assert {"attention", "linear", "norm"} <= {op.kind for op in captured.graph.ops}


def test_python_functions_of_operators_get_every_argument():
    aten, tensors = torch.ops.aten, [floats(4, 3), floats(4, 3)]
    found = python_function(aten.mse_loss.default)
    assert found is not None
    args, kwargs = every_argument(aten.mse_loss.default, tensors, {})
    assert torch.equal(found(*args, **kwargs), aten.mse_loss.default(*tensors))
    # The function's own default does not reduce.
    assert found(*tensors).shape == (4, 3)
    # Several overloads, and none that takes a tensor.
    assert python_function(aten.add.Tensor) is None and python_function(aten.triu_indices.default) is None
    # Generated code would find torch's own torch.cdist by this name, which takes other arguments.
    assert python_function(aten.cdist.default) is None


def test_the_p_of_a_norm_is_no_chance():
    aten, x = torch.ops.aten, floats(4, 3)
    for operator, args in ((aten.cdist.default, [x, x, 2.0, None]), (aten.renorm_.default, [x, 2, 0, 1.0])):
        assert not is_random(operator, args, {})
    assert is_random(aten.dropout.default, [x, 0.5, True], {}) and is_random(aten.randn_like.default, [x], {})
    assert not is_random(aten.dropout.default, [x, 0.0, True], {}) and not is_random(aten.dropout.default, [x, 0.5, False], {})
