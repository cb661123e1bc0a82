"""Tables of the documentation that are made from the code: `make tables`.

A page says where one goes: `<!-- generated: NAME -->`, the table, `<!-- end -->`. Nothing is listed
here that stands in the code: a new option, setting, method, metric, refusal or module is in its
table once this has run, and tests/test_docs.py fails until it has. vLLM is not needed.
"""
