// Two Python programs that test the functions of an untrusted program, here "the program". Each of the two
// runs in its own sandbox. One socket connects them.
//
//   tester    has the tests and no code of the program. If a test calls a function of the program, the tester
//             sends the call to the servant and compares the returned value itself.
//   servant   has the program and no tests. It loads program.py, executes calls and sends back values.
//
// So the program can neither see the expected values nor claim that it passed. Exiting, printing, patching
// its interpreter or writing to the socket changes only the values that the tester compares.
//
// Values cross the socket as lines of JSON. Lists, tuples, sets, dictionaries, numbers, texts, bytes, ranges
// and iterators keep their types. Objects of other classes stay in the servant. The tester gets a handle,
// which stands for such an object. Two handles are equal if they stand for the same object. A test fails if
// it compares a handle with a value or uses it as a condition. If a function changes its arguments in place,
// the tester does not see the change.
#pragma once

namespace bough {

// The first part of both programs: converts values to and from JSON.
inline constexpr const char* kCodeValues = R"py(
import collections, decimal, fractions, json, sys
sys.set_int_max_str_digits(0) if hasattr(sys, "set_int_max_str_digits") else None
ITERATED = 10000  # of an iterator so many elements cross
EXACT = {type(None): None, bool: bool, int: int, float: float, str: str}


def pack(value, handle):
    kind = type(value)
    if kind in EXACT:
        return value
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for base, tag in ((list, None), (tuple, "t"), (set, "s"), (frozenset, "f"), (collections.deque, "q")):
            if isinstance(value, base):
                packed = [pack(item, handle) for item in value]
                return packed if tag is None else {tag: packed}
    if isinstance(value, dict):
        return {"d": [[pack(k, handle), pack(v, handle)] for k, v in value.items()]}
    for base in (int, float, str):  # of a class of its own: its plain value
        if isinstance(value, base):
            return base(value)
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, (decimal.Decimal, fractions.Fraction)):
        return {"n" if isinstance(value, decimal.Decimal) else "r": str(value)}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if kind in (type({}.keys()), type({}.items())):
        return {"s": [pack(item, handle) for item in value]}
    if isinstance(value, collections.abc.Iterator):
        packed = []
        for item in value:
            packed.append(pack(item, handle))
            if len(packed) == ITERATED:
                break
        return {"i": packed}
    return handle(value)


def unpack(packed, handle):
    if isinstance(packed, list):
        return [unpack(item, handle) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((tag, value),) = packed.items()
    if tag in ("t", "s", "f", "q", "i"):
        items = [unpack(item, handle) for item in value]
        made = {"t": tuple, "s": set, "f": frozenset, "q": collections.deque, "i": iter}
        return made[tag](items)
    if tag == "d":
        return {unpack(k, handle): unpack(v, handle) for k, v in value}
    if tag == "c":
        return complex(*value)
    if tag == "b":
        return bytes.fromhex(value)
    if tag == "n":
        return decimal.Decimal(value)
    if tag == "r":
        return fractions.Fraction(value)
    if tag == "range":
        return range(*value)
    return handle(packed)
)py";

inline constexpr const char* kCodeServant = R"py(
import socket

channel = socket.socket(fileno=3)
lines = channel.makefile("r", encoding="ascii")
kept = []  # what crossed as a handle


def keep(value):
    for number, other in enumerate(kept):
        if other is value:
            return {"h": number}
    kept.append(value)
    return {"h": len(kept) - 1}


def send(message):
    channel.sendall(json.dumps(message).encode("ascii") + b"\n")


def resolve(name):
    if name in program and callable(program[name]):
        return program[name]
    if "Solution" in program and hasattr(program["Solution"], name):
        return getattr(program["Solution"](), name)
    raise NameError("the program defines no function %s" % name)


program = {"__name__": "program"}
try:
    # What programs on contest sites may use without an import.
    exec("from typing import *\nfrom collections import *\nfrom itertools import *\nfrom functools import *\n"
         "from heapq import *\nfrom bisect import *\nimport bisect, collections, copy, functools, heapq\n"
         "import itertools, math, operator, random, re, string\nfrom math import inf", program)
    given = set(program)
    exec(compile(open("program.py", encoding="utf-8").read(), "program.py", "exec"), program)
    names = [n for n in program if n not in given and callable(program[n])]
    names += [n for n in dir(program.get("Solution")) if not n.startswith("__")]
    send({"names": names})
except BaseException as error:
    send({"error": [type(error).__name__, str(error)[:300]]})
    sys.exit(1)
for line in lines:
    try:
        kind, target, name, args, kwargs = json.loads(line)
        unkeep = lambda packed: kept[packed["h"]]
        args = [unpack(a, unkeep) for a in args]
        kwargs = {k: unpack(v, unkeep) for k, v in kwargs.items()}
        if kind == "call":
            result = resolve(name)(*args, **kwargs) if target is None else kept[target](*args, **kwargs)
        elif kind == "get":
            result = getattr(kept[target], name)
        else:
            result = setattr(kept[target], name, args[0])
        answer = {"value": pack(result, keep)}
        text = json.dumps(answer)
    except BaseException as error:
        text = json.dumps({"error": [type(error).__name__, str(error)[:300]]})
    channel.sendall(text.encode("ascii") + b"\n")
)py";

// Reads tests.json: {"setup": code, "asserts": [code], "calls": [{"name", "args", "expected", "wrapped"}],
// "check": {"code", "entry"} or null, "seconds": time limit of one call, "total": of all calls, "tolerance":
// number or null, "all": whether to stop at the first failed test}. Prints one line of JSON: {"passed":
// [bool], "message": of the first failed test}, or {"broken": why} if the tests are no valid Python.
inline constexpr const char* kCodeTester = R"py(
import ast, builtins, math, os, socket, time

tests = json.load(open("tests.json", encoding="utf-8"))
verdict_to = os.fdopen(os.dup(1), "w")  # printed text of the tests is dropped
sys.stdout = open(os.devnull, "w")
channel = socket.socket(fileno=3)
LONGEST = 8 << 20  # bytes of an answer
until = time.monotonic() + tests["total"]
received = b""
calls = 0


class ProgramError(Exception):
    pass


class NoAnswer(BaseException):  # not to be caught by a test
    pass


class Handle:
    def __init__(self, number):
        object.__setattr__(self, "_number", number)

    def __call__(self, *args, **kwargs):
        return ask("call", self._number, None, args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return ask("get", self._number, name, (), {})

    def __setattr__(self, name, value):
        ask("set", self._number, name, (value,), {})

    def __eq__(self, other):
        if not isinstance(other, Handle):
            raise TypeError("an object of the program's own class is compared with a value")
        return self._number == other._number

    def __hash__(self):
        return self._number

    def __bool__(self):
        raise TypeError("an object of the program's own class has no truth value")


def send_handle(value):
    if isinstance(value, Handle):
        return {"h": value._number}
    raise TypeError("a %s cannot be given to the program" % type(value).__name__)


def receive():
    global received
    limit = min(until, time.monotonic() + tests["seconds"])
    while b"\n" not in received[-65536:]:
        left = limit - time.monotonic()
        try:
            channel.settimeout(max(left, 0.001))
            part = channel.recv(65536) if left > 0 else None
        except TimeoutError:
            part = None
        except OSError:
            part = b""
        if part is None:
            raise NoAnswer("the program took longer than its time limit")
        if not part:
            raise NoAnswer("the program ended, or was killed, before it answered")
        received += part
        if len(received) > LONGEST:
            raise NoAnswer("the program's answer is longer than 8 MiB")
    line, _, received = received.partition(b"\n")
    try:
        answer = json.loads(line)
        if "error" in answer:
            name, message = answer["error"]
            raised = getattr(builtins, str(name), None)
            is_exception = isinstance(raised, type) and issubclass(raised, Exception)
            return (raised if is_exception else ProgramError)("%s: %s" % (name, message)), None
        return None, answer
    except (ValueError, TypeError, KeyError, RecursionError):
        raise NoAnswer("the program wrote invalid data to its channel") from None


def ask(kind, target, name, args, kwargs):
    global calls
    packed = [pack(a, send_handle) for a in args]
    message = [kind, target, name, packed, {k: pack(v, send_handle) for k, v in kwargs.items()}]
    try:
        channel.settimeout(tests["seconds"])
        channel.sendall(json.dumps(message).encode("ascii") + b"\n")
    except OSError:
        raise NoAnswer("the program ended, or was killed, before it answered") from None
    error, answer = receive()
    calls += kind == "call"
    if error is not None:
        raise error
    try:
        return unpack(answer["value"], lambda packed: Handle(int(packed["h"])))
    except Exception:
        raise NoAnswer("the program wrote invalid data to its channel") from None


def remote(name):
    return lambda *args, **kwargs: ask("call", None, name, args, kwargs)


def plain(value):  # JSON knows no tuples
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    return value


def same(a, b):
    if tests["tolerance"] is not None and type(a) in (int, float) and type(b) in (int, float):
        return a == b or math.isclose(a, b, rel_tol=tests["tolerance"], abs_tol=tests["tolerance"])
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return not isinstance(a, Handle) and a == b


def run_call(test):
    result = plain(remote(test["name"])(*test["args"]))
    expected = test["expected"]
    wrapped = test["wrapped"] and isinstance(expected, list) and len(expected) == 1
    if not (same(result, expected) or wrapped and same(result, expected[0])):
        raise AssertionError("got %.100r, expected %.100r" % (result, expected))


def namespace_for(code, names):
    """Values of the names that the tests use but do not define: standard modules, else functions of the
    program. A builtin never comes from the program, which could otherwise define its own `all` or `set`."""
    space = {"__name__": "tests"}
    tree = ast.parse(code)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    for name in used - own:
        if name in sys.stdlib_module_names:
            space[name] = __import__(name)
        elif name in names and not hasattr(builtins, name):
            space[name] = remote(name)
    return space


check = tests["check"]
code = "\n".join([tests["setup"], *tests["asserts"], check["code"] if check else ""])
try:  # before any message of the program is read: an error here is the tests' fault
    ast.parse(code)
except (SyntaxError, ValueError, RecursionError) as error:
    verdict_to.write(json.dumps({"broken": "%s: %s" % (type(error).__name__, error)}) + "\n")
    verdict_to.flush()
    os._exit(0)


def run():
    error, answer = receive()
    if error is not None:
        raise NoAnswer(str(error))
    names = set(map(str, answer["names"]))
    space = namespace_for(code, names)
    exec(compile(tests["setup"], "setup", "exec"), space)
    for test in tests["calls"]:
        yield lambda: run_call(test)
    for test in tests["asserts"]:
        yield lambda: exec(compile(test, "test", "exec"), space)
    if check:
        exec(compile(check["code"], "test", "exec"), space)
        yield lambda: space["check"](remote(check["entry"]))


passed, message = [], ""
total = len(tests["calls"]) + len(tests["asserts"]) + (tests["check"] is not None)
try:
    for test in run():
        calls = 0
        try:
            test()
            if calls == 0:
                raise AssertionError("the test calls no function of the program")
            passed.append(True)
        except Exception as error:
            passed.append(False)
            message = message or "test %d: %s: %s" % (len(passed), type(error).__name__, str(error)[:300])
            if tests["all"]:
                break
except BaseException as error:
    message = message or "test %d: %s" % (len(passed) + 1, str(error)[:300])
passed += [False] * (total - len(passed))
verdict_to.write(json.dumps({"passed": passed, "message": message}) + "\n")
verdict_to.flush()
os._exit(0)
)py";

}  // namespace bough
