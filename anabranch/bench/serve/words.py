"""Common short words: most vocabularies have a token for each, so any server can be loaded."""

from __future__ import annotations

_TEXT = """
able about above across add after again against age ago air all almost alone along already also
always among animal another answer any apple area arm around art ask away baby back bad ball
bank base basic bear beat beautiful because become bed before begin behind believe best better
between big bird black blood blue board boat body book born both bottom box boy bread break
bring brother brown build burn busy buy call came car care carry case cat catch cause center
chair chance change check child city clean clear close cloud coat cold color come common cook
cool corner cost count country course cover cross cry cup cut dance dark daughter day dead deal
deep door double down draw dream dress drink drive drop dry during each ear early earth east
easy eat edge eight either else empty end enough enter even evening ever every eye face fact
fall family far farm fast father feel field fight figure fill final find fine finger finish
fire first fish five floor flow fly follow food foot force forest form forward four free fresh
friend front full game garden gave girl give glass gold gone good great green ground group grow
half hand happy hard head hear heart heavy help here high hill history hold home hope horse
hour house human hundred idea inside iron island job join jump keep key kind king kitchen know
lady lake land language large last late laugh law lead learn leave left leg less letter level
life light line list little live long look lost love low machine main make man many map mark
market matter mean meet middle might mile milk mind minute money month moon morning mother
mountain mouth move music name near neck need never new next night nine noise north note number
ocean offer office often oil old once only open order other outside over own page paint pair
paper part party pass past pay people perhaps person picture piece place plain plan plant play
point poor power present press problem pull push queen question quick quiet rain reach read
ready reason red rest rich ride right ring rise river road rock room round rule run safe said
sail salt same sand save school sea second seed seem sell send sense set seven shape ship shoe
shop short shoulder show side sign silver simple since sing sister sit six size skin sky sleep
slow small smile snow soft soil some song soon sound south space speak spell spring stand star
start state stay step still stone stop store story street strong study such sugar summer sun
sure table tail take talk tall teach team tell ten test than thank thing think third thousand
three through time today together tool top touch toward town trade train tree trip true try
turn two uncle under until upon usual valley very voice wait walk wall want war warm wash watch
water wave way wear week well west wheel white whole why wide wife wild win wind window winter
wish woman wonder wood word work world write wrong yard year yellow yes yet young
"""
WORDS = tuple(_TEXT.split())
