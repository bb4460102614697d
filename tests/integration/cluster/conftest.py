from support.etcd import etcd_cluster

__all__ = ["etcd_cluster"]
