"""Whether the emulated device finds faults planted in the order of work (docs/cuda_emulation.md)."""

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass

import pytest
from emulation_build import BUILD, ROOT, last_command, run_command
from runs.run_util import write_experiment

FOLDER = BUILD / "cuda_emulation"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "BOUGH_EMULATED_CUDA": "1", "BOUGH_EMULATED_MEMORY": "2000000000"}


@pytest.fixture(scope="module", autouse=True)
def built():
    subprocess.run([ROOT / "scripts" / "build", "release", "cuda_emulation"], check=True)


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in a file. `cases` of the test program, or a run of `bough` with the settings
    `cases`, then end with a message that has `expected`."""

    name: str
    file: str
    old: str
    new: str
    program: str
    cases: str | dict
    expected: str


COPIES, OFFLOAD = "src/train/host_copies.cpp", "src/train/offloaded_update.cpp"
GRAPHS = "src/kernels/common/cuda_graph_cuda_ops.cpp"
REUSED_BUFFER = """static const at::Tensor pinned =
      at::empty({1 << 20}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  std::memcpy(pinned.mutable_data_ptr(), bytes_.data(), bytes_.size());
  const at::Tensor buffer = pinned.narrow(0, 0, std::ssize(bytes_)).to(device_, /*non_blocking=*/true);"""

FAULTS = [
    Fault(
        "copy_before_its_source_is_computed",
        COPIES,
        "ready.block(*stream_);",
        "",
        "train_test",
        "*HostCopiesOn*cuda",
        "waits for no event on stream 0",
    ),
    Fault(
        "use_before_the_copy_is_done",
        COPIES,
        "done_->block(present_stream(stream_->device()));",
        "",
        "train_test",
        "*HostCopiesOn*cuda",
        "is freed while",
    ),
    Fault(
        "source_freed_during_the_copy",
        COPIES,
        "source_ = std::move(from);",
        "source_ = at::empty({0});",
        "train_test",
        "*HostCopiesOn*cuda",
        "is freed while",
    ),
    Fault(
        "update_before_the_gradient_arrives",
        OFFLOAD,
        "copies_->finish(slot.arrived);",
        "",
        "train_test",
        "*OptimizerOn.StepsOfAnOffloadedStateAreTheCpus*cuda",
        "the host has waited for no event",
    ),
    Fault(
        "forward_before_the_weights_are_back",
        OFFLOAD,
        "done.block(guard_.getStream(device_));",
        "",
        "train_test",
        "*OptimizerOn.StepsOfAnOffloadedStateAreTheCpus*cuda",
        "nothing orders",
    ),
    Fault(
        "engine_begins_before_the_weights_are_there",
        "src/kernels/common/priority_stream.cpp",
        "synchronize(device);",
        "",
        "kernels_test",
        "CudaPriorityStream.*",
        "waits for no event on stream 0",
    ),
    Fault(
        "pinned_piece_read_before_it_arrives",
        "src/kernels/common/host_snapshot.cpp",
        "transfers_->finish(first + number - 1);",
        "",
        "kernels_test",
        "CudaHostSnapshot.*",
        "the host has waited for no event",
    ),
    Fault(
        "pinned_buffer_reused",
        "src/kernels/common/host_to_device.cpp",
        "const at::Tensor buffer = upload(bytes_, device_);",
        REUSED_BUFFER,
        "train_test",
        "*TrainingOn.Bf16ErrsNoMore*cuda",
        "an access on the host writes",
    ),
    Fault(
        "input_of_a_graph_freed",
        "src/rollout/forward_pass.cpp",
        "if (!inputs_2T_.defined()) inputs_2T_ =",
        "inputs_2T_ =",
        "rollout_test",
        "*ForwardPassOn.GeneratedLogProbabilities*cuda",
        "a graph is replayed after memory that it uses was freed",
    ),
    Fault(
        "engine_destroyed_while_its_thread_has_work",
        "src/rollout/embedded_engine.cpp",
        "synchronize(model_.device());",
        "",
        "rollout_test",
        "CudaQuantization.*",
        "is freed while",
    ),
    Fault(
        "engine_writes_to_the_weights_that_are_trained",
        "src/rollout/copied_weights.cpp",
        "    parameter->value = parameter->value.clone();\n",
        "",
        "bough",
        {"device": "cuda", "rollout.max_head_offpolicyness": 2},
        "nothing orders",
    ),
    Fault(
        "result_of_a_recording_read_too_early",
        GRAPHS,
        "    order(stream, current);\n  }\n  void replay",
        "  }\n  void replay",
        "kernels_test",
        "CudaGraphs.*",
        "nothing orders",
    ),
]


def plant(fault, folder):
    """Compiles the file with the fault. Links the program or, for a file of the CUDA library, the library."""
    path = ROOT / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.file} has not one {fault.old!r}; plant the fault elsewhere"
    planted, compiled = folder / path.name, folder / "object.o"
    planted.write_text(text.replace(fault.old, fault.new))
    if path.name.endswith("cuda_ops.cpp"):
        ops = folder / "ops.cpp"
        ops.write_text((FOLDER / "ops.cpp").read_text().replace(str(path), str(planted)))
        built, linked = FOLDER / "objects" / "ops.cpp.o", "libbough_cuda.so"
        command = last_command(built).replace(f"-c {FOLDER}/ops.cpp", f"-c {ops}")
        command = command.replace(f"-MF {built}.d", "-MF /dev/null")
        run_command(command.replace(f"-o {built}", f"-o {compiled}"))
        link = last_command(FOLDER / linked)
        for name in (str(built), os.path.relpath(built, BUILD)):
            link = link.replace(f" {name} ", f" {compiled} ")
    else:
        objects = BUILD / "CMakeFiles" / f"bough_{fault.file.split('/')[1]}.dir"
        words = shlex.split(last_command(objects / "Unity" / "unity_0_cxx.cxx.o"))
        words[words.index("-c") + 1] = str(planted)
        words[words.index("-o") + 1] = str(compiled)
        words[words.index("-MF") + 1] = "/dev/null"
        run_command(shlex.join(words))
        linked = fault.program
        # The first of several definitions counts.
        link = last_command(FOLDER / linked)
        link = link.replace(" -rdynamic ", f" {compiled} -Wl,-z,muldefs -rdynamic ", 1)
    run_command(link.replace(f"-o {FOLDER / linked}", f"-o {folder / linked}"))
    for name in ("libbough_cuda.so", fault.program):
        if not (folder / name).exists():
            shutil.copy(FOLDER / name, folder / name)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, bough, tmp_path):
    plant(fault, tmp_path)
    if fault.program == "bough":
        write_experiment(bough, **fault.cases)
        arguments = ["train", "config.yaml"]
    else:
        arguments = [f"--gtest_filter={fault.cases}", "--gtest_brief=1"]
    done = subprocess.run(
        [tmp_path / fault.program, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=900,
        check=False,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode != 0, f"{fault.name} was not found:\n{done.stdout[-2000:]}"
    assert "CUDA emulation: " in done.stderr and fault.expected in done.stderr, done.stderr[-3000:]
