"""scripts/step_path on a made-up trace: what is on the path of a step, and what counts as a climb."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = ["base", "plan", "control", "kernels", "models", "rollout", "run"]
# parent, object, offset, first call
TRACE = """\
0 bin/bough 10 0
1 bin/bough 20 7
2 bin/bough 30 8
3 lib/lib kernels.so 40 9
4 lib/lib kernels.so 50 10
2 bin/bough 60 11
3 bin/bough 70 12
7 lib/lib kernels.so 40 13
1 bin/bough 80 0
9 lib/lib kernels.so 40 0
"""


@pytest.fixture(scope="module")
def step_path():
    loader = SourceFileLoader("step_path", str(ROOT / "scripts" / "step_path"))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def functions(step_path):
    described = {
        ("bin/bough", 0x10): ("bough::Run::work()", "run/run.cpp"),
        ("bin/bough", 0x20): ("bough::Engine::step(bough::Pass const&)", "rollout/engine.cpp"),
        ("bin/bough", 0x30): ("bough::Decoder::forward()", "models/decoder.cpp"),
        ("lib/lib kernels.so", 0x40): ("bough::linear(at::Tensor)", "kernels/linear/linear.cpp"),
        ("lib/lib kernels.so", 0x50): ("bough::multiply(float*)", "kernels/linear/linear_avx512.cpp"),
        ("bin/bough", 0x60): ("bough::write_log()", "rollout/log.cpp"),
        ("bin/bough", 0x70): ("bough::PagedContext::attend()", "rollout/paged_context.cpp"),
        ("bin/bough", 0x80): ("bough::warm_up()", "run/warm_up.cpp"),
    }
    return {key: step_path.Function(*named, 1) for key, named in described.items()}


def test_the_path_is_what_is_on_the_stack_of_a_kernel_in_the_step(step_path, functions):
    nodes = step_path.parse_trace(TRACE)
    path = step_path.find_path(nodes, functions, MODULES)
    assert path.nodes == [1, 2, 3, 4, 7, 8]
    assert [path.depth[i] for i in path.nodes] == [1, 2, 3, 4, 4, 5]
    assert "sampling" in path.missing_work
    summary = step_path.summarise(path, nodes, functions)
    assert [(e["module"], e["file"], e["first_function"], e["depth"]) for e in summary["files"]] == [
        ("run", "run/run.cpp", "Run::work", 1),
        ("rollout", "rollout/engine.cpp", "Engine::step", 2),
        ("models", "models/decoder.cpp", "Decoder::forward", 3),
        ("kernels", "kernels/linear/linear.cpp", "linear", 4),
        ("rollout", "rollout/paged_context.cpp", "PagedContext::attend", 4),
    ]
    assert summary["climbs"] == [
        ["models/decoder.cpp: Decoder::forward", "rollout/paged_context.cpp: PagedContext::attend"]
    ]


def test_a_function_without_description_is_skipped(step_path, functions):
    del functions["bin/bough", 0x30]
    path = step_path.find_path(step_path.parse_trace(TRACE), functions, MODULES)
    assert path.nodes == [1, 2, 4, 7, 8]
    assert path.climbs == []


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("bough::Executor::forward(bough::Plan const&, std::vector<int>)", "Executor::forward"),
        ("bough::(anonymous namespace)::Walk::run()", "Walk::run"),
        ("bough::Loss::operator()(bough::LossRows const&) const", "Loss::operator()"),
        (
            "bough::RunWorkers::train(bough::TrainOrder)::{lambda()#1}::operator()() const",
            "RunWorkers::train::[lambda]",
        ),
        ("bough::for_each<int, std::vector<bough::A> >(std::function<void (int)>)", "for_each"),
    ],
)
def test_short_names(step_path, name: str, short: str):
    assert step_path.Function(name, "", 1).short_name == short
