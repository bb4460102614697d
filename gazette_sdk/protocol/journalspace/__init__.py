"""Journal space: specs of many journals as a tree, and as YAML (protocol section 14).

A node whose name is empty or ends in ``/`` is a directory: all journals below it inherit its
partial spec. Any other node is a journal. ``tree`` has the nodes and operations on them, ``text``
reads and writes YAML.

From YAML to brokers::

    root = parse(text)
    root.validate()
    push_down(root)
    request = to_apply_request(root)

And back::

    root = from_list_response(response.journals)
    hoist(root)
    text = dump(root)
"""
