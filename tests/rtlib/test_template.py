"""What a hostile or broken chat template can do: nothing but be refused, in bounded time and memory."""

from __future__ import annotations

import time

import pytest

from rtlib.errors import PromptError, TokenizerError
from rtlib.template import SOURCE_LIMIT, Template

MESSAGES = [{"role": "user", "content": "hi"}]

REFUSED_WHEN_READ = {
    "macro": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "captured block": "{% set x %}a{% endset %}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "filter that pads": "{{ 'a' | center(10000000000) }}",
    "filter that reads attributes": "{{ messages[0] | attr('__class__') }}",
    "unfinished": "{% if",
    "deep": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "deep blocks": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "long number": "{{ 1" + "0" * 5000 + " }}",
    "too long": " " * (SOURCE_LIMIT + 1),
}

REFUSED_WHEN_RUN = {
    "repeat": "{{ 'a' * 10000000000 }}",
    "dunder": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "dunder by item": "{{ messages.append.__globals__['os'] }}",
    "mutation": "{{ messages.append(1) }}",
    "printf": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format map": "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "padding": "{{ 'a'.ljust(9999999999) }}",
    "jinja globals": "{{ lipsum(100000) }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "printing a function": "{{ range }}",
    "printing the template": "{{ self }}",
    "big range": "{{ range(10000000) | list }}",
    "squaring": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "division": "{{ 1 / 0 }}",
    "missing": "{{ nothing.at.all }}",
    "json of anything": "{{ range | tojson }}",
    "json indent": "{{ [1] | tojson(indent=100000000) }}",
    "namespace in itself": "{% set n = namespace() %}{% set n.x = [n] %}",
    "namespaces nested": "{% set n = namespace() %}{% for i in range(99) %}{% set n.x = namespace(a=n) %}{% endfor %}",
}

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that print": "{% for a in range(99999) %}{% for b in range(99999) %}aaaa{% endfor %}{% endfor %}",
    "doubling by plus": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by tilde": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling a list": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "shared lists": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "shared dicts": "{% set n = namespace(x={}) %}{% for i in range(99) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}",
}


@pytest.mark.parametrize("name", REFUSED_WHEN_READ)
def test_refused_when_read(name):
    with pytest.raises(TokenizerError, match=r"here: .*(allowed|not a usable|expected 100000)") as error:
        Template(REFUSED_WHEN_READ[name], "here")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", REFUSED_WHEN_RUN)
def test_refused_when_run(name):
    template = Template(REFUSED_WHEN_RUN[name], "here")
    with pytest.raises(PromptError, match="here: the chat template fails") as error:
        template.render(messages=MESSAGES)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_is_stopped(name):
    template = Template(ENDLESS[name], "here")
    started = time.monotonic()
    with pytest.raises(PromptError, match="loops too long or makes too much text"):
        template.render(messages=MESSAGES)
    assert time.monotonic() - started < 15  # the deadline is 10 s, the budget is spent in 2


def test_budget_is_fresh_in_every_rendering():
    template = Template("{% for i in range(90000) %}{% endfor %}{{ messages[0].content }}", "here")
    assert {template.render(messages=MESSAGES) for _ in range(20)} == {"hi"}


def test_whitespace_and_json_as_in_hugging_face():
    template = Template("{% if true %}\n  {{ messages | tojson }}\n  {% endif %}\nend\n", "here")
    assert template.render(messages=["é<&>"]) == '  ["é<&>"]\nend'


def test_what_templates_use_works():
    source = (
        "{%- set ns = namespace(n=0) -%}"
        "{%- for m in messages if m.role == 'user' -%}"
        "{%- set ns.n = ns.n + 1 -%}"
        "{{ loop.index0 % 2 }}{{ m['content'].strip() | upper }}{{ loop.last }}{{ m.tool_calls is defined }}"
        "{%- if loop.index == 1 %}{% continue %}{% endif %};"
        "{%- endfor -%}"
        "{{ ns.n }}{{ messages[1:] | length }}{{ (messages | map(attribute='content') | list)[-1] ~ '!' }}"
    )
    messages = [{"role": "user", "content": " a "}, {"role": "user", "content": "b"}]
    assert Template(source, "here").render(messages=messages) == "0AFalseFalse1BTrueFalse;21b!"


def test_what_the_template_says_about_the_messages_is_passed_on():
    template = Template("{{ raise_exception('roles must\nalternate') }}", "here")
    with pytest.raises(PromptError, match="refuses the messages: roles must alternate"):
        template.render(messages=MESSAGES)
