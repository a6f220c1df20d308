// Tests the functions of chat_template.h and corner cases of the interpreter.
// tests/parity/test_chat_template.py compares the templates of real models with transformers.
#include "text/chat_template.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "text/chat_template_jinja.h"
#include "text/message.h"

namespace bough {
namespace {

std::string run(const std::string& source, const OrderedJson& variables = OrderedJson::object()) {
  return jinja::render(jinja::parse(source, "test"), jinja::Value::from_json(variables), "test", 0);
}

std::string error_of(const std::string& source, const OrderedJson& variables = OrderedJson::object()) {
  try {
    return "no error, but " + run(source, variables);
  } catch (const UserError& error) {
    return error.what();
  }
}

TEST(ChatTemplate, PlainChatMl) {
  Conversation chat;
  chat.messages = {message_of("system", "S"), message_of("user", "U\n")};
  EXPECT_EQ(ChatTemplate().render(chat),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU\n<|im_end|>\n");
  chat.add_generation_prompt = true;
  EXPECT_EQ(ChatTemplate().render(chat),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU\n<|im_end|>\n<|im_start|>assistant\n");
}

TEST(ChatTemplate, EverythingOfAConversationReachesTheTemplate) {
  const auto chat = ChatTemplate::from_text(
      "{{ bos_token }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}|{{ documents[0].text }}|{{ mode "
      "}}|"
      "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson "
      "}}"
      "{% endfor %}{{ m.content is none }},{% endfor %}{{ add_generation_prompt }}|{{ strftime_now('%Y') }}",
      "test", {{"bos_token", "<s>"}});
  Conversation conversation;
  conversation.tools = parse_ordered_json(R"([{"z": 1, "a": 1.0}])", "tools");
  conversation.documents = parse_ordered_json(R"([{"text": "D"}])", "documents");
  conversation.variables = {{"mode", "fast"}};
  conversation.messages = parse_ordered_json(
      R"([{"role": "user", "content": ""},
          {"role": "assistant", "content": null,
           "tool_calls": [{"function": {"arguments": {"y": 1, "b": "é"}}}]}])",
      "messages");
  conversation.now = 86'400 * 366;
  EXPECT_EQ(chat.render(conversation),
            "<s>{\"z\": 1, \"a\": 1.0}|D|fast|user:False,assistant:{\"y\": 1, \"b\": \"é\"}True,False|1971");
}

TEST(ChatTemplate, MissingTemplatesAndRefusedConversationsAreUserErrors) {
  EXPECT_THROW(ChatTemplate::from_directory("/no/such/directory"), UserError);
  const auto chat = ChatTemplate::from_text("\n{{ raise_exception('no ' + messages[0].role) }}", "file");
  try {
    Conversation conversation;
    conversation.messages = {message_of("tool", "")};
    chat.render(conversation);
    FAIL();
  } catch (const UserError& error) {
    EXPECT_STREQ(error.what(), "file:2: chat template: it refuses the conversation: no tool");
  }
}

TEST(Jinja, Expressions) {
  EXPECT_EQ(run("{{ 1 + 2 * 3 - -4 }}"), "11");
  EXPECT_EQ(
      run("{{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2**10 }} {{ -7.5 // 2 }} {{ 1e16 }} {{ 0.1 + 0.2 }}"),
      "-4 2 3.5 1024 -4.0 1e+16 0.30000000000000004");
  EXPECT_EQ(run("{{ 'a' ~ 1 ~ true ~ none ~ missing }}"), "a1TrueNone");
  EXPECT_EQ(run("{{ not 1 == 2 and 'b' in 'abc' and 2 not in [1, 3] }}{{ 1 < 2 <= 2 != 3 }}"), "TrueTrue");
  EXPECT_EQ(run("{{ x[-1] }}{{ x[::-1][0] }}{{ x[1:]|length }}{{ x[:1]|first }}{{ 'añb'[1:] }}",
                {{"x", {1, 2, 3}}}),
            "3321ñb");
  EXPECT_EQ(run("{{ 'x' if a is defined else 'y' }}{{ 'z' if false }}"), "y");
  EXPECT_EQ(run(R"({{ ' a '.strip() ~ 'xax'.lstrip('x') ~ 'a,b'.split(',')[1] ~ 'é|trim'|length }})"),
            "aaxb6");
  EXPECT_EQ(run("{{ a.b['c'] is string }}{{ a.items is string }}{{ a['items'] }}",
                {{"a", {{"b", {{"c", ""}}}, {"items", 7}}}}),
            "TrueFalse7");
  EXPECT_EQ(run(R"({{ "%}" ~ '}}' ~ "\n\"\x41\q" 'b' }})"), "%}}}\n\"A\\qb");
  EXPECT_EQ(run("{{ [1, 'a\\'b', none, 2.0] }}{{ {'k': (1,)} }}{{ [1, 2] == [1, 2] }}"),
            "[1, \"a'b\", None, 2.0]{'k': (1,)}True");
}

TEST(Jinja, LoopsHaveTheirOwnScopeNamespacesDoNot) {
  EXPECT_EQ(run("{% set y = 0 %}{% for i in x %}{% set y = i %}{{ y }}{% endfor %}{{ y }}", {{"x", {1, 2}}}),
            "120");
  EXPECT_EQ(run("{% for i in [1] %}{% endfor %}{{ i is defined }}{{ loop is defined }}"), "FalseFalse");
  EXPECT_EQ(run("{% set n = namespace(y=0) %}{% for i in x %}{% set n.y = n.y + i %}{% endfor %}{{ n.y }}",
                {{"x", {1, 2}}}),
            "3");
  EXPECT_EQ(
      run("{% for i in x %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }};{% endfor %}", {{"x", {5, 6}}}),
      "0TrueFalse;1FalseTrue;");
  EXPECT_EQ(run("{% for i in range(9) if i is odd %}{% if i == 3 %}{% continue %}{% endif %}{% if i > 5 %}{% "
                "break %}"
                "{% endif %}{{ i }}/{{ loop.length }}{{ loop.previtem }} {% else %}none{% endfor %}"
                "{% for i in [] %}{% else %}none{% endfor %}"),
            "1/4 5/43 none");
  EXPECT_EQ(run("{% for k, v in d.items() recursive %}{{ k }}{{ loop.depth }}{{ loop(v.items()) if v }}{% "
                "endfor %}",
                {{"d", {{"a", {{"b", 0}}}}}}),
            "a1b2");
}

TEST(Jinja, MacrosAndBlocks) {
  EXPECT_EQ(run("{% macro m(a, b=a ~ 'x') %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(1, b=2) }}{{ m(b=3, "
                "a=4) }}"),
            "11x1243");
  EXPECT_EQ(run("{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, k=2) }}"), "(1,){'k': 2}");
  EXPECT_EQ(run("{% macro m() %}<{{ caller('u') }}>{% endmacro %}{% call(x) m() %}{{ x }}v{% endcall %}"),
            "<uv>");
  EXPECT_EQ(run("{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}"),
            "3210");
  EXPECT_EQ(run("{% set x | upper %}a{{ 1 }}{% endset %}{{ x }}{% filter trim | upper %} b {% endfilter %}"),
            "A1B");
  EXPECT_EQ(
      run("{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}{% set a, b = [3, 4] %}{{ b }}"),
      "3False4");
  EXPECT_EQ(
      run("{% raw %}{{ x }}{% endraw %}{% generation %}{% set y = 1 %}{{ y }}{% endgeneration %}{{ y }}"),
      "{{ x }}1");
  // A macro that is called after the loop that defined it has ended still sees the loop's variables.
  EXPECT_EQ(
      run("{% set n = namespace() %}{% for i in [7] %}{% macro m() %}{{ i }}{% endmacro %}{% set n.m = m %}"
          "{% endfor %}{{ n.m() }}"),
      "7");
}

TEST(Jinja, FiltersAndTests) {
  EXPECT_EQ(run("{{ {'b': [1, {}], 'a': '<é\\n'} | tojson }}{{ [] | tojson(indent=2) }}"),
            R"({"b": [1, {}], "a": "<é\n"}[])");
  EXPECT_EQ(run("{{ {'b': [1, 2.50], 'a': 'é'} | tojson(indent=1, ensure_ascii=true, sort_keys=true) }}"),
            "{\n \"a\": \"\\u00e9\",\n \"b\": [\n  1,\n  2.5\n ]\n}");
  EXPECT_EQ(
      run("{{ l | selectattr('a', 'gt', 1) | map(attribute='a') | join('+') }}{{ l | map(attribute='z', "
          "default='-') | list }}",
          {{"l", {{{"a", 1}}, {{"a", 2}}, {{"a", 3}}}}}),
      "2+3['-', '-', '-']");
  EXPECT_EQ(run("{{ 'a b' | title }}{{ x | default('d') }}{{ '' | default('e', true) }}{{ {'b': 1, 'a': 2} | "
                "dictsort }}"),
            "A Bde[('a', 2), ('b', 1)]");
  EXPECT_EQ(run("{{ '<' | e ~ '<' }}{{ ('<' | safe) + '<' }}"), "&lt;<<&lt;");
  EXPECT_EQ(run("{{ 3 is divisibleby 3 }}{{ 1 is in [1] }}{{ none is none }}{{ x is not defined }}"),
            "TrueTrueTrueTrue");
}

TEST(Jinja, WhiteSpaceControl) {
  EXPECT_EQ(run("a\n  {% if true %}\nb\n  {% endif %}\nc\n"), "a\nb\nc");
  EXPECT_EQ(run("a \n {%- if true -%} \n b {{- 'c' -}} \n d{% endif %}"), "abcd");
  EXPECT_EQ(run("  {{ 1 }}\n{# comment #}\n2"), "  1\n2");
  EXPECT_EQ(run("a\n  {%+ if true +%}\nb{% endif %}"), "a\n  \nb");
  EXPECT_EQ(run("a\r\nb{#- x -#}\n c {% raw -%}  d {%- endraw %}\ne"), "a\nbc de");
}

TEST(Jinja, ElseBranches) {
  const std::string source = "{% if x == 1 %}a{% elif x == 2 %}b{% elif x == 3 %}c{% else %}d{% endif %}";
  std::string all;
  for (int x = 1; x <= 4; ++x) all += run(source, {{"x", x}});
  EXPECT_EQ(all, "abcd");
}

TEST(Jinja, ErrorsAreUserErrors) {
  for (const char* source : {"{% if %}",
                             "{{ 1",
                             "{{ (1 }}",
                             "{% for x in y %}",
                             "{% endif %}",
                             "{{ 'a' + 1 }}",
                             "{{ missing.member }}",
                             "{{ missing['member'] }}",
                             "{{ f() }}",
                             "{{ 1 // 0 }}",
                             "{{ raise_exception('no') }}",
                             "{% set 1 = 2 %}",
                             "{{ 'a' is odd }}",
                             "{{ 99999999999999999999 }}",
                             "{{ 9223372036854775807 + 1 }}",
                             "{% for a in 5 %}{% endfor %}",
                             "{% set x.y = 1 %}",
                             "{{ 2 2 }}",
                             "{{ -2**2 }}",
                             "{{ [1].append(2) }}",
                             "{{ {}.items() }}",
                             "{{ namespace() }}",
                             "{{ missing | tojson }}",
                             "{{ {} < {} }}",
                             "{{ {}[[1]:] }}",
                             "{% break %}",
                             "{% macro m() %}{% endmacro %}{{ m(1) }}",
                             "{# a",
                             "{% raw %}",
                             "{{ '\\N{BULLET}' }}"})
    EXPECT_THROW(run(source), UserError) << source;
}

TEST(Jinja, UnsupportedFeaturesAreNamedWithTheirLine) {
  EXPECT_EQ(error_of("a\n\n{{ 'x' | urlize }}"),
            "test:3: chat template: the filter 'urlize' is not supported");
  EXPECT_EQ(error_of("{{ 'x'.encode() }}"),
            "test:1: chat template: the method 'encode' of a string is not supported");
  EXPECT_EQ(error_of("\n{% include 'x' %}"),
            "test:2: chat template: the statement 'include' is not supported");
  EXPECT_EQ(error_of("{{ 1 is filter }}"), "test:1: chat template: the test 'filter' is not supported");
  EXPECT_EQ(error_of("{{ lipsum() }}"), "test:1: chat template: the function 'lipsum' is not supported");
  // A function that is never reached is not refused.
  EXPECT_EQ(run("{% if false %}{{ 'x' | urlize }}{% endif %}ok"), "ok");
}

TEST(Jinja, AdversarialTemplatesEnd) {
  const std::vector<std::string> pieces = {"(",     "[",    "{{",   "not ",  "-",
                                           "{'a':", "x.a(", "x|f(", "x if ", "x["};
  for (const std::string& piece : pieces) {
    std::string deep;
    for (int i = 0; i < 100'000; ++i) deep += piece;
    EXPECT_THROW(run("{{ " + deep), UserError) << piece;
  }
  for (const std::string piece : {" + 1", ".a", "|trim", " is none", "[0]", "()", " ~ 'a'", " and 1"}) {
    std::string chain = "{{ x";
    for (int i = 0; i < 100'000; ++i) chain += piece;
    EXPECT_THROW(run(chain + " }}"), UserError) << piece;
  }
  std::string blocks, loops, ends;
  for (int i = 0; i < 10'000; ++i) blocks += "{% if true %}";
  EXPECT_THROW(run(blocks), UserError);
  for (int i = 0; i < 40; ++i) loops += "{% for a in x %}", ends += "{% endfor %}";
  EXPECT_THROW(run(loops + ends, {{"x", {1, 2, 3, 4}}}), UserError);
  std::string doubling = "{% set s = 'aaaaaaaa' %}{% set l = [1] %}{% set d = [] %}";
  for (int i = 0; i < 40; ++i) doubling += "{% set s = s ~ s %}";
  EXPECT_THROW(run(doubling), UserError);
  for (const char* change :
       {"n.x ~ n.x", "[n.x, n.x]", "[n.x]", "n.x + n.x", "{'k': n.x, 'l': n.x}", "(n.x,) * 9"}) {
    const std::string source =
        str("{% set n = namespace(x=['aaaaaaaa']) %}{% for i in range(100000) %}{% set n.x = ", change,
            " %}{% endfor %}{{ n.x }}{{ n.x == [1] }}");
    EXPECT_THROW(run(source), UserError) << change;
  }
  const std::string shared = error_of(
      "{% set n = namespace(x=['aaaaaaaa']) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor "
      "%}");
  EXPECT_NE(shared.find("a value that is too large"), std::string::npos) << shared;
  EXPECT_THROW(run("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), UserError);
  EXPECT_THROW(run("{% for i in [[1]] recursive %}{{ loop([i]) }}{% endfor %}"), UserError);
  EXPECT_THROW(run("{{ 'a' * 1000000000000 }}"), UserError);
  EXPECT_THROW(run("{{ 'a'.ljust(1000000000000) }}"), UserError);
  EXPECT_THROW(
      run("{% for i in range(99999) %}{% for j in range(99999) %}{% macro m() %}{% endmacro %}{% endfor %}"
          "{% endfor %}"),
      UserError);
  // A namespace that contains itself does not leak (the address sanitizer checks).
  EXPECT_EQ(run("{% set n = namespace() %}{% set n.n = n %}{% set n.l = [n] %}ok"), "ok");
}

// Templates that are cut and mixed at random neither crash nor hang. Each gives an output text or a
// UserError.
TEST(Jinja, RandomTemplatesEnd) {
  const std::vector<std::string> words = {
      "{{",        "}}",     "{%",        "%}",    "{%-",    "-%}",       "{#",    "#}",     "if",
      "else",      "elif",   "endif",     "for",   "in",     "endfor",    "set",   "endset", "macro",
      "endmacro",  "call",   "endcall",   "m",     "(",      ")",         "[",     "]",      "{",
      "}",         ":",      ",",         ".",     "|",      "=",         "==",    "x",      "messages",
      "loop",      "'a'",    "1",         "-",     "~",      "+",         "*",     "%",      "is",
      "not",       "and",    "defined",   "trim",  "tojson", "namespace", "range", "items",  "join",
      "recursive", "filter", "endfilter", "break", "raw",    "endraw",    "\n",    " ",      "\"",
      "1.5",       "caller", "varargs",   "é",     "\xff"};
  uint64_t state = 1;
  const auto draw = [&](size_t n) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<size_t>(state >> 33) % n;
  };
  for (int round = 0; round < 20'000; ++round) {
    std::string source = round % 2 ? "{{ " : "";
    for (size_t i = draw(20) + 1; i > 0; --i) source += words[draw(words.size())] + (draw(3) ? " " : "");
    if (round % 2) source += " }}";
    try {
      run(source, {{"x", {1, "a"}}, {"messages", {{{"role", "user"}, {"items", nullptr}}}}});
    } catch (const UserError&) {
    }
  }
}

}  // namespace
}  // namespace bough
