"""What spark-submit is given: `spark-submit [options of Spark] tarry_spark.py compact|forecast|audit [options]`."""

from compaction import main, spark_submit

spark_submit.separate_outputs()
main.main()
