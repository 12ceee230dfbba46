import io.netty.buffer.ByteBuf;
import io.netty.buffer.Unpooled;
import io.netty.util.Timeout;
import io.netty.util.Timer;
import java.io.DataOutputStream;
import java.io.FileOutputStream;
import java.lang.reflect.Field;
import java.lang.reflect.Proxy;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Clock;
import java.time.Instant;
import java.time.ZoneOffset;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import org.apache.bookkeeper.mledger.ManagedCursor;
import org.apache.bookkeeper.mledger.ManagedLedger;
import org.apache.pulsar.broker.delayed.bucket.BucketDelayedDeliveryTracker;
import org.apache.pulsar.broker.delayed.bucket.BucketSnapshotStorage;
import org.apache.pulsar.broker.delayed.proto.SnapshotMetadata;
import org.apache.pulsar.broker.delayed.proto.SnapshotSegment;
import org.apache.pulsar.broker.service.persistent.PersistentDispatcherMultipleConsumers;

/**
 * Lets Pulsar's own tracker seal one bucket of the rows of a file, and writes the entries that it would store.
 *
 * Arguments: the rows (ledger,entry,deliver_at_ms with a heading, ledgers ascending), the file to write, the time step of
 * a segment in ms, its maximum of rows. Each entry is written as BookkeeperBucketSnapshotStorage makes it, behind its
 * length (4 bytes, big-endian).
 */
public class SealBucket {
    public static void main(String[] arguments) throws Exception {
        List<long[]> rows = Files.readAllLines(Path.of(arguments[0])).stream().skip(1)
                .map(line -> java.util.Arrays.stream(line.split(",")).mapToLong(Long::parseLong).toArray()).toList();
        long firstDue = rows.stream().mapToLong(row -> row[2]).min().orElseThrow();
        long lastLedger = rows.get(rows.size() - 1)[0];
        Written storage = new Written(arguments[1]);
        BucketDelayedDeliveryTracker tracker = new BucketDelayedDeliveryTracker(
                dispatcher(), answering(Timer.class, Map.of("newTimeout", answering(Timeout.class, Map.of()))), 1000,
                Clock.fixed(Instant.ofEpochMilli(firstDue - 3_600_000), ZoneOffset.UTC), true, storage,
                rows.size(), Long.parseLong(arguments[2]), Integer.parseInt(arguments[3]), -1);
        for (long[] row : rows) {
            tracker.addMessage(row[0], row[1], row[2]);
        }
        // The tracker seals when a message of a later ledger comes and it has as many as a bucket needs.
        tracker.addMessage(lastLedger + 1, 0, firstDue);
        if (storage.buckets != 1) {
            throw new IllegalStateException(storage.buckets + " buckets were sealed, not 1");
        }
        System.exit(0);
    }

    /** The tracker asks it for its name and its cursor, and nothing else while it seals. */
    private static PersistentDispatcherMultipleConsumers dispatcher() throws Exception {
        Field unsafe = sun.misc.Unsafe.class.getDeclaredField("theUnsafe");
        unsafe.setAccessible(true);
        var made = (PersistentDispatcherMultipleConsumers) ((sun.misc.Unsafe) unsafe.get(null))
                .allocateInstance(PersistentDispatcherMultipleConsumers.class);
        ManagedLedger ledger = answering(ManagedLedger.class, Map.of("getName", "tenant/namespace/persistent/orders"));
        set(made, "name", "orders / billing");
        set(made, "cursor", answering(ManagedCursor.class, Map.of(
                "getName", "billing", "getManagedLedger", ledger, "getCursorProperties", Map.of(),
                "putCursorProperty", CompletableFuture.completedFuture(null))));
        return made;
    }

    private static void set(Object of, String name, Object value) throws Exception {
        Field field = PersistentDispatcherMultipleConsumers.class.getDeclaredField(name);
        field.setAccessible(true);
        field.set(of, value);
    }

    /** An object that answers each of these methods with its value, and refuses every other one. */
    private static <T> T answering(Class<T> type, Map<String, Object> answers) {
        return type.cast(Proxy.newProxyInstance(type.getClassLoader(), new Class<?>[] {type}, (proxy, method, given) -> {
            if (!answers.containsKey(method.getName())) {
                throw new UnsupportedOperationException(method.toString());
            }
            return answers.get(method.getName());
        }));
    }

    private static class Written implements BucketSnapshotStorage {
        private final String path;
        private int buckets;

        Written(String path) {
            this.path = path;
        }

        @Override
        public CompletableFuture<Long> createBucketSnapshot(SnapshotMetadata metadata, List<SnapshotSegment> segments,
                String bucketKey, String topicName, String cursorName) {
            try (DataOutputStream out = new DataOutputStream(new FileOutputStream(path))) {
                write(out, metadata.toByteArray());
                for (SnapshotSegment segment : segments) {
                    ByteBuf buffer = Unpooled.buffer(segment.getSerializedSize());
                    segment.writeTo(buffer);
                    byte[] payload = new byte[buffer.readableBytes()];
                    buffer.readBytes(payload);
                    write(out, payload);
                }
            } catch (java.io.IOException error) {
                throw new java.io.UncheckedIOException(error);
            }
            return CompletableFuture.completedFuture((long) ++buckets);
        }

        private static void write(DataOutputStream out, byte[] entry) throws java.io.IOException {
            out.writeInt(entry.length);
            out.write(entry);
        }

        @Override
        public CompletableFuture<SnapshotMetadata> getBucketSnapshotMetadata(long bucketId) {
            throw new UnsupportedOperationException();
        }

        @Override
        public CompletableFuture<List<SnapshotSegment>> getBucketSnapshotSegment(long bucketId, long first, long last) {
            throw new UnsupportedOperationException();
        }

        @Override
        public CompletableFuture<Long> getBucketSnapshotLength(long bucketId) {
            return CompletableFuture.completedFuture(0L);
        }

        @Override
        public CompletableFuture<Void> deleteBucketSnapshot(long bucketId) {
            throw new UnsupportedOperationException();
        }

        @Override
        public void start() {
        }

        @Override
        public void close() {
        }
    }
}
