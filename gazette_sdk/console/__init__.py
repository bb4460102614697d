"""Web console: static pages that read a cluster through the public calls.

Read ``mount`` first: it serves the files of ``static/`` below ``/console/`` of any HTTP host. The
pages have no data of their own and no key. They call ``/v1/`` and journals by their URLs, with the
token that the user of the page has given. ``content`` is what a server adds: masks of fields, and
names of protobuf fields. ``forward`` is the console as a server of its own, which
forwards these calls to a broker and to a consumer process.
"""
