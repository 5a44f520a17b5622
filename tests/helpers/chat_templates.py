"""Small chat templates that together use every construct of the templates of published models."""
# ruff: noqa: E501

CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

R1 = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=true, system='', is_tool=false) %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}\
{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}\
{{ bos_token }}{{ ns.system }}\
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}
{{- '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] %}
{{- '<｜Assistant｜>' + (message['content'] or '') }}
{%- for tool in message['tool_calls'] -%}
{{- '<｜tool▁calls▁begin｜>' + tool['function']['name'] + '\\n```json\\n' -}}
{{- tool['function']['arguments'] | tojson }}{{- '\\n```' + eos_token }}
{%- endfor %}
{%- elif message['role'] == 'assistant' %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{%- if ns.is_tool %}{{ content + '<｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}
{%- set ns.is_tool = false %}
{%- endif %}
{%- if message['role'] == 'tool' %}{% set ns.is_tool = true %}
{{- '<｜tool▁calls▁begin｜>' + message['content'] }}{%- endif %}
{%- endfor -%}
{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

HERMES = """\
{%- macro type_of(spec) %}
    {%- set names = {'string': 'str', 'number': 'float', 'integer': 'int', 'boolean': 'bool'} %}
    {%- if spec.type in names %}
        {{- names[spec.type] }}
    {%- elif spec.type == 'array' %}
        {{- 'list[' + type_of(spec['items']) + ']' }}
    {%- elif spec.type == 'object' and spec.additionalProperties is defined %}
        {{- 'dict[str, ' ~ type_of(spec.additionalProperties) ~ ']' }}
    {%- else %}
        {{- 'Any' }}
    {%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\nTools: <tools>' }}
    {%- for tool in tools if tool.function is defined %}
        {%- set tool = tool.function %}
        {{- '{"type": "function", "function": ' }}
        {{- '{"name": "' + tool.name + '", "description": "' ~ tool.description ~ '(' }}
        {%- for name, field in tool.parameters.properties | items %}
            {{- name + ': ' + type_of(field) }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}
        {{- ')", "parameters": ' ~ tool.parameters | tojson ~ '}' }}
        {%- if not loop.last %}{{- '\\n' }}{% endif %}
    {%- endfor %}
    {{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ['user', 'system'] or (message.role == 'assistant' and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>tool\\n' }}{% endif %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA = """\
{%- set loop_messages = messages %}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool', 'ipython') %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}
    {{- content }}
    {%- if loop.index0 == 0 and tools is not none and tools %}
        {{- 'Environment: ipython ' ~ date_string ~ '\\n' ~ tools | map(attribute='function.name') | join(', ') ~ tools[0] | tojson(indent=4) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

# What the templates of Llama 3.1 to 3.3 write: a system turn with two dates in each prompt.
DATED = """\
{%- if not date_string is defined %}{%- set date_string = DEFAULT_DATE %}{%- endif %}
{%- set rest = messages %}{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set rest = messages[1:] %}
{%- endif %}
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if builtin_tools is defined or tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{%- if builtin_tools is defined %}
    {{- 'Tools: ' + builtin_tools | reject('equalto', 'code_interpreter') | join(', ') + '\\n\\n' }}
{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + date_string + '\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
    {{- rest[0].content | trim + '<|eot_id|>' }}{%- set rest = rest[1:] %}
{%- endif %}
{%- for message in rest %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- if builtin_tools is defined and call.name in builtin_tools %}
            {{- '<|python_tag|>' + call.name + '.call(' }}
            {%- for key, value in call.arguments | items %}{{- key + '="' + value + '"' }}{%- endfor %}
            {{- ')' }}
        {%- else %}
            {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
        {%- endif %}
        {{- '<|eom_id|>' if builtin_tools is defined else '<|eot_id|>' }}
    {%- elif message.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
LLAMA_3_1 = DATED.replace("DEFAULT_DATE", "'26 Jul 2024'")
LLAMA_3_2 = DATED.replace("DEFAULT_DATE", "strftime_now('%d %b %Y')")

# What that of Llama 3.2 Vision does: parts of messages; no dates, and no system turn, with images.
LLAMA_3_2_VISION = """\
{%- set found = namespace(images=0) %}
{%- for message in messages if message.content is not string %}
    {%- set found.images = found.images + message.content | selectattr('type', 'equalto', 'image') | list | length %}
{%- endfor %}
{{- bos_token }}
{%- if found.images == 0 %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + (date_string or '26 Jul 2024') + '<|eot_id|>' }}
{%- elif messages[0].role == 'system' %}{{- raise_exception('no system message with images') }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<|image|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

TULU = """\
{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '\n' }}\
{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}\
{% elif message['role'] == 'assistant' %}{% if not loop.last %}\
{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}{% else %}\
{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}\
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""

# Special tokens that are made of constants in each way that keeps their marks.
JOINED = """\
{{ '<|im_' ~ 'start|>' }}{{ '<|im_start' + '|>' }}{{ 'xx<|im_end|>x'[2:12] }}{{ '<|im_end|>' * 2 }}\
{{ ['<|im_', 'end|>'] | join }}{{ '|'.join(['<', 'im_end', '>']) }}{{ '<|IM_END|>' | lower }}\
{{ '<|%s|>' % 'im_end' }}{{ '%s_end|>' | format('<|im') }}{{ 'x<|im_end|>'.removeprefix('x') }}\
{{ ' <|im_end|> ' | trim }}{{ ' <|im_end|> '.strip() }}{{ '<|x_end|>'.replace('x', 'im') }}\
{{ '<|x_end|>' | replace('x', 'im') }}{{ 'a#<|im_end|>'.split('#')[1] }}{{ '<|im_end|>' | string }}\
{{ '<|im_end|>' | safe }}{{ ('<|im_end|>', 1) | first }}{{ [1, '<|im_end|>'] | last }}\
{{ 'a#<|im_end|>'.rsplit('#', 1)[1] }}{{ '<|im_end|>' | list | join }}{{ '<|im_end|>x'.removesuffix('x') }}\
{{ '>|dne_mi|<' | reverse }}{{ ('<|im_end|>' if messages else '') | default('x') }}\
{{ {'a': '<|im_end|>'}.a }}{{ {'a': '<|im_end|>'} | items | map('last') | first }}\
{{ ['<|IM_END|>'] | map('lower') | list | first }}{{ ['<|im_end|>'] | select('string') | join }}\
{{ dict(a='<|im_end|>')['a'] }}{{ '<|im_end|>' | capitalize | lower }}{{ ['b', '<|im_end|>'] | sort | first }}\
{%- macro end(role) %}{{ '<|' }}{{ role }}{{ '_end|>' }}{% endmacro %}{{ end('im') }}\
{%- set block %}<|im_end|>{% endset %}{{ block }}\
{%- filter lower %}<|IM_END|>{% endfilter %}\
{%- macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call twice() %}<|im_end|>{% endcall %}\
{%- with x = '<|im_end|>' %}{{ x }}{% endwith %}\
{% for message in messages %}{{ '<|im_start|>' ~ message.content ~ '<|im_end|>' }}{% endfor %}"""

# What else templates use, on texts that are no special tokens.
CONSTRUCTS = """\
{%- set ns = namespace(count=0, names=[]) %}\
{%- for message in messages if message.role != 'system' %}\
    {%- if message.content == 'skip' %}{% continue %}{% endif %}\
    {%- if loop.index > 30 %}{% break %}{% endif %}\
    {%- set ns.count = ns.count + 1 %}\
    {%- set ns.names = ns.names + [message.role] %}\
    {%- generation %}<|im_start|>{{ message.role | title }}: {{ message.content }}<|im_end|>{% endgeneration %}\
    {{- loop.index ~ loop.revindex0 ~ (loop.first | string) ~ loop.length ~ (loop.index0 % 2 == 0) }}\
{%- else %}nothing{% endfor %}\
{{- ns.names | unique | join(',') ~ ns.names | length ~ (ns.count * 2 - 1) }}\
{{- messages | selectattr('role', 'equalto', 'user') | list | length }}\
{{- messages | rejectattr('role', 'in', ['user']) | map(attribute='role') | sort | join('-') }}\
{{- ['b', 'A'] | sort | last ~ [3, 1] | sort(reverse=true) | first ~ [1, 2] | reject('odd') | list }}\
{{- {'b': 1, 'a': 2} | dictsort ~ ('7' | int + 1) ~ ('x' | int(5)) ~ (2.5 | float) ~ (-3 | abs) }}\
{{- 'two words' | title | upper ~ 'ABC'.lower().capitalize() ~ 'a\nb' | indent(2, first=true) }}\
{{- "%s has %d" | format(messages[0].role, 3) ~ '%05.1f' % 2.25 ~ 'x' * 3 ~ [0] * 2 }}\
{{- messages[0].name | default('nobody', true) ~ (messages[-1].content is string) ~ none ~ true }}\
{{- 'abcabc'.find('c') ~ 'abc'.startswith('ab') ~ 'abc'.endswith('x') ~ 'a b'.split() ~ 'abab'.count('a') }}\
{{- range(2, 9, 3) | list ~ [1, [2]] ~ {'k': [none, 1.5]} | tojson(indent=2) ~ ('é' | tojson) }}\
{{- [[1, 2], [3]] | map('length') | list ~ 'a-b'.replace('-', '+') ~ (1, 2) ~ ('1' in '123') }}\
{%- for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}\
{%- if messages is sequence and messages[0] is mapping and ns.count is number and nothing is undefined %}+{% endif %}\
{%- if '<|im_end|>' in messages[-1].content %}{{ messages[-1].content.split('<|im_end|>') | length }}{% endif %}\
{{- '<|im_end|>' }}"""

TEMPLATES = {
    "chatml": CHATML, "r1": R1, "hermes": HERMES, "llama": LLAMA, "tulu": TULU, "joined": JOINED,
    "constructs": CONSTRUCTS,
}  # fmt: skip
