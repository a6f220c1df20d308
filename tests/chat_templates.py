"""Chat templates for tests: short ones that use the features of current models' templates, and TRL's."""

import functools
import importlib.util
import os
import zipfile
from pathlib import Path

PLAIN = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# A default system message, put before the first message.
DEFAULT_AT_FIRST = """
{%- for m in messages -%}
  {%- if loop.first and m.role != "system" -%}
    {{ "<|im_start|>system\nBe brief.<|im_end|>\n" }}
  {%- endif -%}
  {%- if m.role in ["system", "user", "assistant"] and not (m.role == 'system' and loop.index0 > 0 and strict is defined) -%}
    {{ "<|im_start|>" ~ m["role"] }}
{% generation %}{{ m.content | trim }}{% endgeneration %}
    {{- "<|im_end|>\n" -}}
  {%- else -%}
    {{ raise_exception("role " + m.role) }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt is defined and add_generation_prompt -%}{{ "<|im_start|>assistant\n" }}{%- endif -%}
"""

# Branches for tools, which are parsed but never run.
WITH_TOOLS = """{# tools first #}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}
    {{- "<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- for call in message.tool_calls %}{{- call.function.arguments | tojson }}{%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- 'first' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Keeps the reasoning of answers after the last question. Drops earlier reasoning.
THINKING = """
{%- set ns = namespace(open=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" and message.content is string and not (message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role in ['user', 'system'] %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {%- set thoughts = '' %}
        {%- if message.thoughts is string %}
            {%- set thoughts = message.thoughts %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or (not loop.last and thoughts)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Text outside of tags: white space control, and blocks that remove the line break after them.
LAYOUT = """{% for message in messages %}
  {%- if message.role %}
<|im_start|>{{ message.role }}
{{ message.content -}}
    <|im_end|>
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif +%}
"""

# Turns between headers, a date, tools in the first question, strict alternation of roles.
HEADER = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|header|>system<|end|>\n\nToday: " + date_string + "\n\n" + system + "<|eot|>" }}
{%- if tools is not none and messages | length != 0 %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|header|>user<|end|>\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first + "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message and message.tool_calls %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' ~ (call.arguments | tojson) ~ "}<|eot|>" }}
    {%- elif message.role == "tool" %}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot|>" }}
    {%- else %}
        {{- '<|header|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end|>\n\n' }}{%- endif %}
"""

# Roles that must alternate, tools as a list of printed dicts, message contents as parts.
BRACKETS = """{%- set ns = namespace(index=0, last=-1, closed=false) -%}
{%- for message in messages if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {%- if ns.index == ns.last and tools -%}
            [TOOLS]{{ tools }}[/TOOLS]{{ tools | map(attribute='function') | map(attribute='name') | sort | join(',') }}
        {%- endif -%}
        {%- set ns.index = ns.index + 1 -%}
        [Q]{%- if message.content is string %}{{ message.content }}{% else %}
            {%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{%- endfor %}
        {%- endif %}[/Q]
    {%- elif message['role'] in ['assistant', 'system'] -%}
        {{ ' ' ~ (message.content or '') ~ eos_token }}
        {%- for call in message.tool_calls or [] -%}
            {{ "%s#%d" % (call.function.name, loop.index) }}{{ call.function.arguments | string | replace("'", '"') }}
            {%- if not loop.last %}, {% endif -%}
        {%- endfor -%}
    {%- else -%}
        {%- if ns.closed is not true and loop.previtem is defined and loop.previtem.role != 'tool' %}<r>{% endif -%}
        {{ message.content }}
    {%- endif -%}
{%- endfor -%}
"""

# Macros that write a tool's schema recursively, with the keys in an order of their own.
SCHEMA = """{%- macro kind_of(p, depth=0) -%}
    {%- if p.type is string -%}
        {%- if p.type == 'array' -%}{{ kind_of(p['items'], depth + 1) }}[]
        {%- elif p.type == 'object' and p.properties -%}
            { {%- for name, value in p.properties | dictsort %}{{ ' ' * depth }}{{ name }}: {{ kind_of(value, depth=depth + 1) }}
            {%- if not loop.last %}, {% endif %}{% endfor %} }
        {%- else -%}{{ p.type | upper }}{%- if p.enum %} in {{ p.enum | join(' | ') }}{% endif %}{%- endif -%}
    {%- elif p.type is iterable -%}{{ p.type | map('title') | join('/') }}
    {%- elif p.anyOf is defined -%}{% for option in p.anyOf %}{{ kind_of(option) }}{{ '|' if not loop.last }}{% endfor %}
    {%- else -%}any{%- endif -%}
{%- endmacro -%}
{%- macro wrapped(name) -%}<{{ name }}>{{ caller(name | length) }}</{{ name }}>{%- endmacro -%}
{% for tool in tools or [] %}
{% set f = tool.function if tool.function is defined else tool %}
{% call(n) wrapped('tool') %}{{ n }} {{ f.name }}({% for key, p in f.parameters.properties | items %}
{{ key }}{{ '' if key in (f.parameters.required or []) else '?' }}: {{ kind_of(p) | trim }}{% endfor %}){% endcall %}

{% endfor %}
{% for message in messages %}
{% set body %}{{ message.content | default('', true) | string | indent(2) }}{% endset %}
{{ '%s> ' % message.role }}{{ body }}{% for c in message.tool_calls %} {{ c.function.name }}({% set args = c.function.arguments %}
{% if args is mapping %}{% for k, v in args.items() %}{{ k }}={{ v if v is string else v | tojson }};{% endfor %}{% else %}{{ args }}{% endif %}){% endfor %}

{% endfor %}
{{ 'assistant> ' if add_generation_prompt }}
"""

# Channels: reasoning is kept only after the last answer. Also loop controls, `filter` and `with` blocks.
CHANNELS = """{% set last = namespace(final=-1) %}
{% for m in messages %}{% if m.role != 'assistant' or m.tool_calls %}{% continue %}{% endif %}{% set last.final = loop.index0 %}{% endfor %}
<|start|>system<|message|>{% filter trim | replace('  ', ' ') %}
  You think.  Today is {{ strftime_now('%Y') | length }}. {% if enable_thinking is not defined or enable_thinking %}on{% else %}off{% endif %}

{% endfilter %}<|end|>
{%- for m in messages %}
{%- with thoughts = m.reasoning_content or (m.content.split('</think>')[0] if m.content is string and '</think>' in m.content else none) %}
<|start|>{{ m.role }}
{%- if thoughts and loop.index0 > last.final %}<|channel|>analysis<|message|>{{ thoughts.strip() }}<|end|>{% endif %}
{%- endwith %}
{%- for part in ([m.content] if m.content is string else m.content or []) %}
{%- if part is mapping and part.get('type') != 'text' %}<{{ part['type'] | capitalize }}>{% break %}{% endif %}
<|message|>{{ part if part is string else part.text }}{{ loop.cycle('', ';') }}
{%- endfor %}
{%- for c in m.tool_calls or [] %} to={{ c['function']['name'].lower() }} {{ c['function']['arguments'] | tojson(sort_keys=true) }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""

TEMPLATES = {
    "plain": PLAIN,
    "default_at_first": DEFAULT_AT_FIRST,
    "with_tools": WITH_TOOLS,
    "thinking": THINKING,
    "layout": LAYOUT,
    "header": HEADER,
    "brackets": BRACKETS,
    "schema": SCHEMA,
    "channels": CHANNELS,
}


@functools.cache
def trl_templates() -> dict[str, str]:
    """TRL's templates by name, from the installed package or from the wheel that scripts/setup downloads. Empty
    if neither is there."""
    spec = importlib.util.find_spec("trl")
    if spec and spec.origin:
        files = sorted(Path(spec.origin).parent.glob("chat_templates/*.jinja"))
        return {file.stem: file.read_text() for file in files}
    wheels = Path(__file__).resolve().parent.parent / ".venv" / "peer-wheels"
    for wheel in Path(os.environ.get("BOUGH_PEER_WHEELS") or wheels).glob("trl-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(
                n for n in archive.namelist() if n.startswith("trl/chat_templates/") and n.endswith(".jinja")
            )
            return {Path(name).stem: archive.read(name).decode() for name in names}
    return {}
