from support.etcd import etcd, etcd_server

__all__ = ["etcd", "etcd_server"]
