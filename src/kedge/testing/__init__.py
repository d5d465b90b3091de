"""Conformance suites for adapters: they state the contracts of the ports as tests.

A suite is a class to derive from. It needs pytest, and one method that opens the adapter:

    from kedge.testing.blobs_suite import BlobsSuite

    class TestMyBlobs(BlobsSuite):
        def open_blobs(self, where):
            return MyBlobs(where)

`index_suite.IndexSuite` tests an index, in four modules. `faults` injects failures between a store and its ports.
"""
