from support.etcd import etcd, etcd_cluster, etcd_server

__all__ = ["etcd", "etcd_cluster", "etcd_server"]
