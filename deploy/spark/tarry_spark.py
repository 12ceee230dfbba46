"""What spark-submit is given: `spark-submit [options of Spark] tarry_spark.py compact|forecast|audit [options]`."""

from batch.cli import entry
from batch.engine import spark_session

spark_session.separate_outputs()
entry.main()
