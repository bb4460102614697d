"""Appends at their primary (broker sections 5, 8 and 9).

- `machine`, `inputs`: the append state machine and the facts it decides on; pure.
- `append`: performs the effects of the machine.
- `response`: responses, as messages or encoded.
- `content`, `flow_control`: content from the client, and its rates.
- `store_health`, `suspend`, `assignments`: preconditions, suspension, routes in Etcd.
- `proxy`, `pulse`: appends to another primary; empty appends to own journals.
"""
