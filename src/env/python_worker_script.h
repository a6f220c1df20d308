// The programs of Python workers, started as python3 -u -c <kPythonWorkerStart + another part> FILE NAME.
// The protocols are in reward_protocol.h and environment_protocol.h.
#pragma once

namespace bough {

// The common first part: sets up the descriptors, defines the messages and loads the user's file.
inline constexpr char kPythonWorkerStart[] = R"PY(
import importlib.machinery, importlib.util, inspect, json, math, os, reprlib, sys, traceback

path, name = sys.argv[1], sys.argv[2]
# The protocol moves to private descriptors before any code of the user runs: what that prints goes to stderr,
# and what it reads from stdin is empty.
requests = os.fdopen(os.dup(0), "rb")
replies = os.fdopen(os.dup(1), "wb")
null = os.open(os.devnull, os.O_RDONLY)
os.dup2(null, 0)
os.dup2(2, 1)


def reply(**message):
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


def describe(error):
    try:
        text = str(error)
    except BaseException:
        text = "(its message cannot be shown)"
    text = text.encode("utf-8", "replace").decode()
    if not isinstance(error, SyntaxError):  # which names file and line itself
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        if lines:
            text += f" ({os.path.basename(path)}, line {lines[-1]})"
    return f"{type(error).__name__}: {text[:1000]}"


def load(kind, is_kind):
    """Loads `name` from the file. If it is missing, the error lists the objects that `is_kind` accepts."""
    sys.path[0] = os.path.dirname(path)
    module_name = os.path.splitext(os.path.basename(path))[0]
    if module_name in sys.modules:  # such as json.py
        module_name = "reward_" + module_name
    loader = importlib.machinery.SourceFileLoader(module_name, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(module_name, loader))
    sys.modules[module_name] = module
    loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if is_kind(value)]
        raise LookupError(f"no {kind} {name!r} in it; it has: {', '.join(own) or 'none'}")
    return found

)PY";

// Scores completions by the user's function.
inline constexpr char kPythonRewardWorker[] = R"PY(

def accepted_names(function):
    """The keyword arguments that the function takes; None if it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL}


def call(function, names, request):
    arguments = {**request["fields"], **{key: request[key] for key in ("prompt", "completion", "answer")}}
    if names is not None:
        arguments = {key: value for key, value in arguments.items() if key in names}
    result = function(**arguments)
    if isinstance(result, (str, bytes)) or not hasattr(result, "__float__"):
        kind = type(result).__name__
        raise TypeError(f"{name} returned {reprlib.repr(result)} ({kind}), expected a number")
    reward = float(result)
    if not math.isfinite(reward):
        raise ValueError(f"{name} returned {reward}, expected a finite number")
    return reward


def main():
    try:
        function = load("function", inspect.isfunction)
        names = accepted_names(function)
    except BaseException as error:
        reply(ready=False, error=describe(error))
        return
    reply(ready=True)
    for line in requests:
        request = json.loads(line)
        # SystemExit and KeyboardInterrupt, too: whatever the function does, the worker answers.
        try:
            reward = call(function, names, request)
        except BaseException as error:
            reply(id=request["id"], error=describe(error))
        else:
            reply(id=request["id"], reward=reward)


main()
)PY";

// Runs one conversation at a time, each with a new object of the user's class.
inline constexpr char kPythonEnvironmentWorker[] = R"PY(
import asyncio


def answer(result, allowed):
    """A method's result as a reply: a dict, or for short a text, messages, or (messages, reward, done)."""
    if isinstance(result, tuple):
        result = dict(zip(("messages", "reward", "done"), result, strict=False))
    elif isinstance(result, (str, list)):
        result = {"messages": result}
    elif result is None:
        result = {}
    if not isinstance(result, dict):
        raise TypeError(f"got {reprlib.repr(result)}, expected a dict with some of {', '.join(allowed)}")
    unknown = set(result) - set(allowed)
    if unknown:
        key = sorted(map(str, unknown))[0]
        raise TypeError(f"got the key {key!r}, expected some of {', '.join(allowed)}")
    return result


def run(function, *arguments):
    result = function(*arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def close(environment):
    try:
        if hasattr(environment, "close"):
            run(environment.close)
    except BaseException as error:
        print(f"close: {describe(error)}", file=sys.stderr)


def handle(environment, request):
    if request["method"] == "reset":
        result = run(environment.reset, request["problem"], request["seed"])
        return answer(result, ("messages", "tools"))
    result = run(environment.step, request["action"])
    return answer(result, ("messages", "reward", "done", "rewards", "invalid_calls"))


def main():
    try:
        make = load("class", inspect.isclass)
        for method in ("reset", "step"):
            if inspect.isclass(make) and not callable(getattr(make, method, None)):
                raise LookupError(f"{name} has no method {method!r}; an environment has reset and step")
    except BaseException as error:
        reply(ready=False, error=describe(error))
        return
    reply(ready=True)
    environment = None
    for line in requests:
        request = json.loads(line)
        if request["method"] in ("close", "reset") and environment is not None:
            close(environment)
            environment = None
        if request["method"] == "close":
            continue
        try:
            if environment is None:
                environment = make()
            result = json.dumps({**handle(environment, request), "id": request["id"]}, default=repr)
        except BaseException as error:
            reply(id=request["id"], error=describe(error))
        else:
            replies.write(result.encode() + b"\n")
            replies.flush()


main()
)PY";

}  // namespace bough
