"""Runs inside gdb, for scripts/step_path. Describes the functions at the offsets in the file FUNCTIONS_IN,
one hexadecimal number per line. Writes a JSON list of [offset, name, file, line, class, types] to
FUNCTIONS_OUT.

`class` is the type of `this`, or "". `types` are the other types of namespace bough in the signature."""

import json
import os
import re

import gdb

TYPE_NAME = re.compile(r"bough::(?:\(anonymous namespace\)::)?[A-Z]\w*(?:::[A-Z]\w*)*")
ENUMS = {}


def without_variants(text):
    """A function of a std::variant takes one of its types, so the types in the variant do not count."""
    while (begin := text.find("std::variant<")) >= 0:
        depth, end = 0, begin
        for end in range(text.index("<", begin), len(text)):
            depth += {"<": 1, ">": -1}.get(text[end], 0)
            if depth == 0:
                break
        text = text[:begin] + text[end + 1 :]
    return text


def is_enum(name):
    if name not in ENUMS:
        try:
            ENUMS[name] = gdb.lookup_type(name).strip_typedefs().code == gdb.TYPE_CODE_ENUM
        except gdb.error:
            ENUMS[name] = False
    return ENUMS[name]


def bough_types(of):
    of = of.strip_typedefs()
    while of.code in (gdb.TYPE_CODE_PTR, gdb.TYPE_CODE_REF, gdb.TYPE_CODE_RVALUE_REF):
        of = of.target().strip_typedefs()
    names = TYPE_NAME.findall(without_variants(str(of)))
    return [name for name in names if not is_enum(name)]


def describe(offset):
    block = gdb.block_for_pc(offset)
    while block and not block.function:
        block = block.superblock
    if not block:
        return None
    function = block.function
    types = [] if function.type.target() is None else bough_types(function.type.target())
    this = []
    for parameter in function.type.fields():
        found = bough_types(parameter.type)
        if parameter.artificial and not this:
            this = [] if "lambda" in str(parameter.type) else found[:1]
        else:
            types += found
    name, file, line = function.name, function.symtab.filename, function.line
    if line == 0:  # a lambda: its name is operator(), and its file that of the compiled group
        place = gdb.find_pc_line(offset)
        name = gdb.execute(f"info symbol {offset}", to_string=True).split(" in section ")[0]
        file, line = place.symtab.filename if place.symtab else file, place.line
    return [offset, name, file, line, "".join(this), sorted(set(types))]


with open(os.environ["FUNCTIONS_IN"]) as offsets:
    described = [describe(int(line, 16)) for line in offsets]
with open(os.environ["FUNCTIONS_OUT"], "w") as out:
    json.dump([function for function in described if function], out)
