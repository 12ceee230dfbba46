"""What spark-submit is given: `spark-submit [options of Spark] tarry_spark.py compact|forecast|audit [options]`."""

from job_commands import entry
from jobs import spark_submit

spark_submit.separate_outputs()
entry.main()
