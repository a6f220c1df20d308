"""The datasets of the cookbook's recipes with sums in them, as the folders from which `datasets` reads."""

import random
from pathlib import Path

import pyarrow
import pyarrow.parquet

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."


# The example that rl_loop puts before each problem.
EXAMPLE = [
    {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e "
        "8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
]


def write_datasets(folder: Path, count: int = 128, most: int = 20, seed: int = 0, epoch: int = 0) -> None:
    """Writes openai/gsm8k and HuggingFaceH4/no_robots with sums of two numbers from 1 to `most`. The
    conversations of no_robots begin as rl_loop's prompts do. With `epoch`, gsm8k repeats its first `epoch`
    problems."""
    draw = random.Random(seed)
    problems = []
    for _ in range(count):
        a, b = draw.randint(1, most), draw.randint(1, most)
        problems.append({"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"})
    gsm8k = folder / "openai" / "gsm8k"
    (gsm8k / "main").mkdir(parents=True)
    for split in ("train", "test"):
        path = gsm8k / "main" / f"{split}-00000-of-00001.parquet"
        repeated = [problems[i % (epoch or count)] for i in range(count)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(repeated), path)
    (gsm8k / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
        "  - split: test\n    path: main/test-*\n---\n"
    )
    conversations = []
    for problem in problems:
        answer = problem["answer"].split("#### ")[1]
        messages = EXAMPLE + [
            {"role": "user", "content": problem["question"] + SUFFIX},
            {"role": "assistant", "content": f"\\boxed{{{answer}}}"},
        ]
        conversations.append(
            {"prompt": problem["question"], "prompt_id": "x", "messages": messages, "category": "sum"}
        )
    data = folder / "HuggingFaceH4" / "no_robots" / "data"
    data.mkdir(parents=True)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(conversations), data / "train-00000-of-00001.parquet"
    )
