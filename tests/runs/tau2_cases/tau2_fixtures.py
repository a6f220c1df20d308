"""What the tests in tau2_cases share. pytest loads it as a plug-in in tau2's environment."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "tau2"))

from tau2_environment import Tau2Environment

AIRPLANE = "[service_issue]airplane_mode_on[PERSONA:None]"


def action(*calls, content=""):
    """A turn of the model as Bough sends it. A call is a name, or a name with arguments."""
    pairs = [(call, {}) if isinstance(call, str) else call for call in calls]
    listed = [
        {"id": f"c{i}", "name": name, "arguments": arguments} for i, (name, arguments) in enumerate(pairs)
    ]
    return {"text": content, "content": content, "reasoning": "", "calls": listed}


def problem(domain, task, **spec):
    return {"id": task, "tau2": {"domain": domain, "task": task, **spec}}


def opened(domain, task, **spec):
    environment = Tau2Environment()
    environment.reset(problem(domain, task, **spec), 7)
    return environment
