"""The bundled broker: it takes appends, replicates, stores and serves journals.

Its service is a plain async object, which knows neither gRPC nor HTTP; thin fronts carry it.
``process.Broker`` puts a whole broker together. In reading order:

The way of an append
    * ``append_machine`` — what follows what, as tables; pure
    * ``append_judgements`` — what facts mean for an append; pure
    * ``suspend`` — when a journal is suspended and resumed; pure
    * ``flow_control`` — how fast a client may, and how slowly it must, send; pure
    * ``append`` — the shell: performs what the machine says
    * ``store_health`` — waits for the index and the store
    * ``content`` — the client's stream, scattered to all replicas
    * ``pipeline`` — the primary's streams to its peers
    * ``replicate`` — the other end of such a stream
    * ``assignments`` — what the primary writes to Etcd

What a broker has of a journal
    * ``slot`` — ownership of one thing, and the signal that ends waiting for it
    * ``replica`` — index, spool and pipeline of an assigned journal
    * ``resolver`` — makes replicas of assignments, and finds who serves a journal
    * ``pulse`` — empty appends that keep a journal consistent

Content on disk and in stores
    * ``spool`` — the fragment being written
    * ``commit_log``, ``content_file``, ``compression`` — its files
    * ``spool_directory``, ``spool_recovery`` — all spools, which survive the process
    * ``succession`` — whether what they remember is still true
    * ``persister`` — uploads closed fragments
    * ``index`` — which bytes are where
    * ``refresh`` — lists the stores again and again

The service
    * ``authorize`` — who may call, and until when
    * ``listing`` — List with its watch, and Apply
    * ``serve_read`` — metadata and content from an offset on
    * ``fragments_rpc`` — ListFragments and FragmentStoreHealth
    * ``service`` — all calls: authorize, validate, resolve, serve or proxy
    * ``metrics`` — what is counted
    * ``config``, ``process`` — a whole broker: start, drain, stop

Fronts
    * ``fronts`` — what they share
    * ``in_process`` — a transport within the process
    * ``stream_front``, ``grpc_front``, ``http_gateway``, ``json_gateway`` — over the network
"""
